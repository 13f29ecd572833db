"""Data that cannot be read or has no loss: every fault is named, or costs only its own loss; never a hang."""

import json
import math
import tarfile
from pathlib import Path

import pytest
import torch

from mimo_train.commands.train import held_out_line
from mimo_train.logging.sinks.jsonl import read_metrics
from mimo_train.training.interval import add_step, take_means
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


def every_image_from(number: int):
    """Cuts the images of the samples from `number` on behind their header."""

    def spoil(name: str, content: bytes) -> bytes:
        image = name.endswith((".jpg", ".png"))
        return content[: len(content) // 3] if image and int(name.split(".")[0]) >= number else content

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
def test_first_corrupt_image_ends_the_run_with_its_name(layout, digits, tmp_path):
    demo = spoiled(digits, tmp_path / "demo", every_image_from(0))
    with pytest.raises(RankFailure, match=r"train-000000\.tar.*data\.max_bad_samples"):
        train_on_ranks(config("vlm_digits", tmp_path / "run", demo, layout, "train.iters=4"))


def test_tolerated_corrupt_images_count_nowhere_at_any_layout(digits, tmp_path):
    """The images of half the samples are corrupt. Only encoder ranks can see that, yet the loss of these samples
    counts on no rank: the numbers are those of one process, which sees everything."""
    demo = spoiled(digits, tmp_path / "demo", every_image_from(120))
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
    demo = spoiled(digits, tmp_path / "demo", every_image_from(120))
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
    from data.loader import StepLoader
    from mimo_train.training.pretrain import pretrain

    found, close = [], StepLoader.close
    StepLoader.close = lambda self: (found.append(self.dataset.bad_samples.count), close(self))
    pretrain(cfg)
    return max(found)


def test_the_budget_of_a_run_names_a_sample_that_a_rank_knows(digits, tmp_path):
    """No rank finds more bad samples than are allowed, both together do."""
    demo = spoiled(digits, tmp_path / "demo", every_image_from(0))
    layout = ("layout=one_process", "modules.images.layout.dp=2", "modules.language.layout.dp=2")
    allowed = ("data.max_bad_samples=12", "train.global_batch_size=16", "train.micro_batch_size=8", "train.iters=1")
    with pytest.raises(RankFailure, match=r"max_bad_samples: 1[3-6] bad samples, 12 allowed, for example .*train-0"):
        train_on_ranks(config("vlm_digits", tmp_path / "run", demo, *layout, *allowed))


def test_held_out_samples_have_one_budget_over_all_ranks(digits, tmp_path):
    """Two ranks read half of the samples each, and neither finds more bad ones than are allowed."""
    demo = spoiled(digits, tmp_path / "demo", every_image_from(0))
    layout = ("layout=one_process", "modules.images.layout.dp=2", "modules.language.layout.dp=2")
    batch = ("train.global_batch_size=16", "train.micro_batch_size=8", "train.iters=1", "train.eval_samples=16")
    held_out = (f"data.validation_shards={demo}/train", *layout, *batch)
    lines = train_on_ranks(config("vlm_digits", tmp_path / "one", digits, *held_out, "data.max_bad_samples=16"))
    assert lines[-1]["eval/samples"] < 4 and "bad_samples" not in lines[-1]
    with pytest.raises(RankFailure, match=r"max_bad_samples: 1[3-6] bad samples, 12 allowed, for example .*train-0"):
        train_on_ranks(config("vlm_digits", tmp_path / "two", digits, *held_out, "data.max_bad_samples=12"))


def test_placeholders_unlike_images_are_named_with_both_counts(digits, tmp_path):
    demo = spoiled(digits, tmp_path / "demo", one_placeholder_more)
    with pytest.raises(RankFailure, match=r"2 .*1|1 .*2"):
        train_on_ranks(config("vlm_digits", tmp_path / "run", demo, "layout=two_processes", "train.iters=4"))


BATCH = ("train.global_batch_size=8", "train.micro_batch_size=4", "data.shuffle=false", "layout=two_processes")
BATCH = (*BATCH, "data.max_bad_samples=1000", "train.eval_samples=8")


def without_records_before(number: int):
    """Breaks the records of the samples before `number`."""
    return lambda name, content: b"{" if name.endswith(".json") and int(name.split(".")[0]) < number else content


def test_a_run_whose_samples_are_all_bad_ends_with_an_error(digits, tmp_path):
    demo = spoiled(digits, tmp_path / "demo", without_records_before(10**6))
    with pytest.raises(RankFailure, match=r"train\.max_empty_steps: 2 of 2 steps .*, 1 allowed; 16 bad samples so far"):
        train_on_ranks(config("vlm_digits", tmp_path / "run", demo, *BATCH, "train.iters=9", "train.max_empty_steps=1"))


def test_an_empty_step_has_no_loss_and_no_part_in_a_mean(digits, tmp_path):
    """The records of the first step are broken, and all held-out ones."""
    demo = spoiled(digits, tmp_path / "demo", without_records_before(8))
    broken = spoiled(digits, tmp_path / "broken", without_records_before(10**6))
    allowed = (*BATCH, "train.iters=2", "train.max_empty_steps=1", f"data.validation_shards={broken}/train")
    first, second, evaluation = _lines(train_on_ranks(config("vlm_digits", tmp_path / "one", demo, *allowed)))
    assert not _is_number(first["lm loss"]) and second["lm loss"] > 0.1
    assert [first["empty_steps"], second["empty_steps"]] == [1, 1]
    assert not _is_number(evaluation["eval/loss"]) and evaluation["eval/samples"] == 0
    assert held_out_line(evaluation).startswith("held-out: no sample has a token with loss"), "no number"


def _lines(lines: list[dict]) -> tuple[dict, dict, dict]:
    steps = [line for line in lines if "lm loss" in line]
    return steps[0], steps[1], next(line for line in lines if "eval/samples" in line)


def _is_number(value) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def test_the_mean_of_an_interval_is_over_the_steps_with_tokens():
    totals: dict = {}
    for loss, empty in ((0.0, 1.0), (3.0, 0.0), (5.0, 0.0)):
        add_step(totals, {"lm loss": torch.tensor(loss)}, 0, torch.tensor(empty))
    assert float(take_means(totals)["lm loss"]) == 4.0
    add_step(totals, {"lm loss": torch.tensor(0.0)}, 0, torch.tensor(1.0))
    assert math.isnan(take_means(totals)["lm loss"])
    add_step(totals, {"lm loss": torch.tensor(7.0)}, 0, torch.tensor(0.0))
    assert float(take_means(totals)["lm loss"]) == 7.0


def test_a_loss_that_is_no_token_s_counts_in_every_step():
    totals: dict = {}
    for empty in (1.0, 0.0, 0.0, 0.0):
        losses = {"lm loss": torch.tensor(2.0 - 2 * empty), "z_loss": torch.tensor(1.0)}
        add_step(totals, losses, 0, torch.tensor(empty))
    assert {name: float(mean) for name, mean in take_means(totals).items()} == {"lm loss": 2.0, "z_loss": 1.0}
