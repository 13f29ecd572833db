"""Data that cannot be read: every fault ends the run with its name, or costs only its own loss; never a hang."""

import json
import tarfile
from pathlib import Path

import pytest

from mimo_train.logging.sinks.jsonl import read_metrics
from tests.dist.ranks import RankFailure, run_ranks
from tests.dist.runs import TOLERANCE, config, curve, largest_difference, train_on_ranks
from tests.tars import write_tar


def members_of(shard: Path) -> list[tuple[str, bytes]]:
    """(name, bytes) of every member of a shard."""
    with tarfile.open(shard) as tar:
        return [(member.name, tar.extractfile(member).read()) for member in tar]


def spoiled(digits: Path, folder: Path, spoil) -> Path:
    """A copy of the first training shard in which `spoil(name, content)` replaced members."""
    shard = sorted((digits / "train").glob("*.tar"))[0]
    write_tar(folder / "train" / shard.name, [(name, spoil(name, content)) for name, content in members_of(shard)])
    return folder


def every_picture_from(number: int):
    """Cuts the pictures of the samples from `number` on behind their header."""

    def spoil(name: str, content: bytes) -> bytes:
        picture = name.endswith((".jpg", ".png"))
        return content[: len(content) // 3] if picture and int(name.split(".")[0]) >= number else content

    return spoil


def one_placeholder_more(name: str, content: bytes) -> bytes:
    """Adds a placeholder to every record that has one."""
    if not name.endswith(".json"):
        return content
    record = json.loads(content)
    for turn in record.get("conversations", []):
        if "<image>" in turn["value"]:
            turn["value"] = "<image>" + turn["value"]
    return json.dumps(record).encode()


LAYOUTS = ("layout=one_process", "layout=two_processes", "layout=images_tp2_language_pp2")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_corrupt_picture_ends_the_run_with_its_name(layout, digits, tmp_path):
    demo = spoiled(digits, tmp_path / "demo", every_picture_from(0))
    with pytest.raises(RankFailure, match=r"train-000000\.tar.*data\.max_bad_samples"):
        train_on_ranks(config("vlm_digits", tmp_path / "run", demo, layout, "train.iters=4"))


def test_tolerated_corrupt_pictures_count_nowhere_at_any_layout(digits, tmp_path):
    """The pictures of half the samples are corrupt. Only encoder ranks can see that, yet the loss of these samples
    counts on no rank: the numbers are those of one process, which sees everything."""
    demo = spoiled(digits, tmp_path / "demo", every_picture_from(120))
    tolerant = ("train.iters=6", "data.max_bad_samples=1000")
    rows = dict.fromkeys(LAYOUTS, ()) | {LAYOUTS[-1]: ("data.pack=true", "data.pack_length=160")}
    lines = {
        layout: train_on_ranks(config("vlm_digits", tmp_path / layout, demo, layout, *tolerant, *rows[layout]))
        for layout in LAYOUTS
    }
    one = lines[LAYOUTS[0]]
    assert one[-1]["bad_samples"] > 10
    for layout in LAYOUTS[1:]:
        assert [line["bad_samples"] for line in lines[layout]] == [line["bad_samples"] for line in one]
        assert max(largest_difference(curve(one), curve(lines[layout]))) < TOLERANCE
    whole = train_on_ranks(config("vlm_digits", tmp_path / "whole", digits, LAYOUTS[0], *tolerant))
    assert largest_difference(curve(one), curve(whole))[0] > 100 * TOLERANCE


SOME = ("train.iters=6", "train.skip_iters=[2]", "train.log_interval=6", "data.max_bad_samples=1000")


def test_every_bad_sample_counts_once_also_of_a_saved_interval_and_of_a_step_that_is_passed_over(digits, tmp_path):
    """One process finds them all by itself; the run's count over a resume is the same, and its file names each once."""
    demo = spoiled(digits, tmp_path / "demo", every_picture_from(120))
    cfg = config("vlm_digits", tmp_path / "whole", demo, "layout=one_process", *SOME)
    (expected,) = run_ranks(_count_of_the_dataset, 1, cfg)
    assert expected > 10
    assert read_metrics(tmp_path / "whole" / "metrics.jsonl")[-1]["bad_samples"] == expected
    for _ in range(2):
        parts = config("vlm_digits", tmp_path / "parts", demo, "layout=two_processes", *SOME, "train.exit_interval=4")
        lines = train_on_ranks(parts)
    assert [line["bad_samples"] for line in lines] == [expected]
    for run in ("whole", "parts"):
        entries = [json.loads(line) for line in (tmp_path / run / "bad_samples.jsonl").read_text().splitlines()]
        assert len({(entry["shard"], entry["key"]) for entry in entries}) == len(entries) == expected
        assert {entry["part"] for entry in entries} == {"train"} and "cannot decode" in entries[0]["reason"]


def _count_of_the_dataset(cfg) -> int:
    """Trains on one process; bad samples that its dataset has found in the end."""
    from data.pipeline import StepLoader
    from mimo_train.training.pretrain import pretrain

    found, close = [], StepLoader.close
    StepLoader.close = lambda self: (found.append(self.dataset.bad_samples.count), close(self))
    pretrain(cfg)
    return max(found)


def test_the_budget_of_a_run_names_a_sample_that_a_rank_knows(digits, tmp_path):
    """No rank finds more bad samples than are allowed, both together do."""
    demo = spoiled(digits, tmp_path / "demo", every_picture_from(0))
    layout = ("layout=one_process", "modules.images.layout.dp=2", "modules.language.layout.dp=2")
    allowed = ("data.max_bad_samples=12", "train.global_batch_size=16", "train.micro_batch_size=8", "train.iters=1")
    with pytest.raises(RankFailure, match=r"max_bad_samples: 1[3-6] bad samples, 12 allowed, for example .*train-0"):
        train_on_ranks(config("vlm_digits", tmp_path / "run", demo, *layout, *allowed))


def test_held_out_samples_have_one_budget_over_all_ranks(digits, tmp_path):
    """Two ranks read half of the samples each, and neither finds more bad ones than are allowed."""
    demo = spoiled(digits, tmp_path / "demo", every_picture_from(0))
    layout = ("layout=one_process", "modules.images.layout.dp=2", "modules.language.layout.dp=2")
    batch = ("train.global_batch_size=16", "train.micro_batch_size=8", "train.iters=1", "train.eval_samples=16")
    held_out = (f"data.validation_shards={demo}/train", *layout, *batch)
    lines = train_on_ranks(config("vlm_digits", tmp_path / "one", digits, *held_out, "data.max_bad_samples=16"))
    assert lines[-1]["eval/samples"] < 4 and "bad_samples" not in lines[-1]
    with pytest.raises(RankFailure, match=r"max_bad_samples: 1[3-6] bad samples, 12 allowed, for example .*train-0"):
        train_on_ranks(config("vlm_digits", tmp_path / "two", digits, *held_out, "data.max_bad_samples=12"))


def test_placeholders_unlike_pictures_are_named_with_both_counts(digits, tmp_path):
    demo = spoiled(digits, tmp_path / "demo", one_placeholder_more)
    with pytest.raises(RankFailure, match=r"2 .*1|1 .*2"):
        train_on_ranks(config("vlm_digits", tmp_path / "run", demo, "layout=two_processes", "train.iters=4"))


def test_truncated_shard_is_named(digits, tmp_path):
    shard = sorted((digits / "train").glob("*.tar"))[0]
    cut = tmp_path / "demo" / "train" / shard.name
    cut.parent.mkdir(parents=True)
    content = shard.read_bytes()
    cut.write_bytes(content[: len(content) // 2])
    cfg = config("vlm_digits", tmp_path / "run", tmp_path / "demo", "layout=two_processes", "train.iters=4")
    with pytest.raises(RankFailure, match=r"train-000000\.tar.*truncated"):
        train_on_ranks(cfg)


def test_missing_folder_is_named_with_its_key(tmp_path):
    with pytest.raises(RankFailure, match=r"data\.shards: .*nowhere"):
        train_on_ranks(config("vlm_digits", tmp_path / "run", tmp_path / "nowhere", "train.iters=4"))


def test_budget_ends_the_run_at_the_step_that_exceeds_it(digits, tmp_path):
    demo = spoiled(digits, tmp_path / "demo", every_picture_from(120))
    cfg = config(
        "vlm_digits",
        tmp_path / "run",
        demo,
        "layout=two_processes",
        "train.iters=20",
        "data.max_bad_samples=60",
        "train.global_batch_size=32",
    )
    with pytest.raises(RankFailure, match=r"data\.max_bad_samples"):
        train_on_ranks(cfg)
    assert 0 < len(read_metrics(tmp_path / "run" / "metrics.jsonl")) < 5
