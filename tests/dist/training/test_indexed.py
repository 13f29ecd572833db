"""Runs over .bin and .idx files: the same at any layout and after a resume, mixed and with a split, and with documents
that stay apart."""

import shutil

import numpy as np
import pytest

from tests.dist.ranks import RankFailure
from tests.dist.runs import TOLERANCE, config, curve, train_on_ranks
from tests.indexed import END, texts, write_indexed

ONE = "layout=language_one"


def run(tmp_path, name, prefix, *overrides):
    fixed = ("data.shards=", f"data.shards={prefix}") if prefix else ("data.shards=",)
    return train_on_ranks(
        config(
            "gpt_tiny",
            tmp_path / name,
            tmp_path,
            *fixed,
            "data.sequence_length=32",
            "train.micro_batch_size=2",
            *overrides,
        )
    )


def close(one, other):
    assert [point[0] for point in one] == [point[0] for point in other]
    for a, b in zip(one, other, strict=True):
        assert b[1:] == pytest.approx(a[1:], rel=TOLERANCE)


def test_a_mixture_at_any_layout_and_continued(tmp_path):
    write_indexed(tmp_path / "a", texts(300))
    write_indexed(tmp_path / "b", texts(100, 1), np.int32)
    mix = f"data.mix=[{{shards: {tmp_path}/a, weight: 3}}, {{shards: {tmp_path}/b.idx, weight: 1}}]"
    more = ("train.global_batch_size=8", "data.split='90,10'", "train.eval_interval=4", mix)
    whole = run(tmp_path, "whole", "", ONE, *more, "train.iters=4", "checkpoint.save_interval=2")
    assert whole[3]["samples/a"] == 24 and whole[3]["samples/b"] == 8 and whole[3]["loss/b"] > 0
    held_out = whole[-1]
    assert held_out["eval/a/loss"] > 0 and held_out["eval/b/samples"] > 4
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step_00000004")
    layout = ("modules.language.layout={tp: 1, pp: 2, dp: 2, cp: 1}",)
    rest = run(tmp_path, "parts", "", *layout, *more, "train.iters=4")
    close(curve(whole), curve(rest))
    assert rest[-1]["eval/a/loss"] == pytest.approx(held_out["eval/a/loss"], rel=TOLERANCE)
    with pytest.raises(RankFailure, match=r"data\.mix: .*data\.sequence_length was 32"):
        run(tmp_path, "parts", "", ONE, *more, "data.sequence_length=24", "train.iters=5")


def test_documents_that_stay_apart_are_the_same_in_samples_of_any_length(tmp_path):
    """Two documents of a sample have the losses that each has in a sample of its own."""
    random = np.random.default_rng(0)
    documents = [[*random.integers(97, 123, 17).tolist(), END] for _ in range(80)]
    write_indexed(tmp_path / "a", documents)
    write_indexed(tmp_path / "h", documents[::-1])
    apart = (
        "data.pack=true",
        "data.separate_documents=true",
        "data.shuffle=false",
        f"data.validation_shards={tmp_path}/h",
        "train.iters=3",
        "train.eval_interval=3",
    )
    two = ("data.sequence_length=36", "train.global_batch_size=4", "train.eval_samples=8")
    one = ("data.sequence_length=18", "train.global_batch_size=8", "train.eval_samples=16")
    both = run(tmp_path, "two", f"{tmp_path}/a", ONE, *apart, *two)
    each = run(tmp_path, "one", f"{tmp_path}/a", ONE, *apart, *one)
    split = run(tmp_path, "cp", f"{tmp_path}/a", "layout=language_cp2", *apart, *two)
    close(curve(both), curve(each))
    close(curve(both), curve(split))
    for other in (each, split):
        assert other[-1]["eval/loss"] == pytest.approx(both[-1]["eval/loss"], rel=TOLERANCE)


def test_tokens_of_another_tokenizer_end_a_run(tmp_path):
    write_indexed(tmp_path / "a", [[300] * 400])
    with pytest.raises(RankFailure, match=r"data\.tokenizer: .*the id 300"):
        run(tmp_path, "run", f"{tmp_path}/a", "layout=language_dp2", "train.iters=1")
