"""A run on compressed shards: the curve of the indexed ones, cut and continued in another layout."""

import gzip

import pytest

from tests.dist.ranks import RankFailure
from tests.dist.runs import TOLERANCE, config, curve, largest_difference, train_on_ranks

PLAIN = ("data.pad=sequence", "data.shuffle=false", "train.global_batch_size=16", "train.micro_batch_size=4")
TWO, DP2 = "layout=two_processes", "layout=images_dp1_language_dp2"


def test_a_stream_gives_the_curve_of_the_index_and_continues_exactly(digits, tmp_path):
    squeezed = tmp_path / "squeezed"
    squeezed.mkdir()
    for path in (digits / "train").glob("*0.tar"):
        (squeezed / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), 1))
    # One epoch has 240 samples: 18 steps of 16 end in the second one.
    whole = (*PLAIN, "train.iters=18", "optim.decay=constant", f"data.shards={digits}/train/*0.tar")
    indexed = curve(train_on_ranks(config("vlm_digits", tmp_path / "indexed", digits, TWO, *whole)))
    streamed = (*whole, "data.stream=true", f"data.shards={squeezed}", "checkpoint.save_interval=100")

    run_dir = tmp_path / "streamed"
    for iters, layout in ((5, TWO), (18, DP2)):
        cut = config("vlm_digits", run_dir, digits, *streamed, f"train.iters={iters}", layout)
        lines = train_on_ranks(cut)
    found = curve(lines)
    assert found[:5] == indexed[:5], "the same samples in the same layout"
    assert max(largest_difference(indexed, found)) < TOLERANCE
    assert found[-1][1] < 0.8 * found[0][1], "the loss falls"


def test_a_command_that_fails_ends_the_run_with_its_code(digits, tmp_path):
    cfg = config(
        "vlm_digits",
        tmp_path,
        digits,
        TWO,
        *PLAIN,
        "data.stream=true",
        f"data.shards='pipe:cat {digits}/train/*.tar | head -c 150000; exit 3'",
        "train.iters=100",
    )
    with pytest.raises(RankFailure, match="the command ended with exit code 3 after"):
        train_on_ranks(cfg)


def test_ranks_that_read_other_samples_end(digits, tmp_path):
    folder = tmp_path / "choices"  # the first of the two ranks has one shard, the other one another
    folder.mkdir()
    first, second = sorted((digits / "train").glob("*.tar"))[:2]
    choose = f"mkdir {folder}/first 2>/dev/null && echo {first} > $own || echo {second} > $own"
    command = f"own={folder}/$PPID; [ -e $own ] || ( {choose} ); cat $(cat $own)"
    streamed = ("data.stream=true", f"data.shards='pipe:{command}'", "train.iters=4")
    with pytest.raises(RankFailure, match="2 ranks have read different samples"):
        train_on_ranks(config("vlm_digits", tmp_path / "run", digits, TWO, *PLAIN, *streamed))
