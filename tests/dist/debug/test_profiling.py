"""Profiles of chosen steps on chosen ranks."""

import gzip
import json
from pathlib import Path

from tests.dist.runs import config, train_on_ranks


def traces(run_dir: Path) -> dict[str, set[str]]:
    """{file: steps marked in it} of every trace."""
    found = {}
    for path in sorted((run_dir / "profile").rglob("*.gz")):
        events = json.loads(gzip.open(path).read())["traceEvents"]
        names = {event.get("name", "") for event in events}
        assert "aten::mm" in names or "aten::addmm" in names
        found[str(path.relative_to(run_dir / "profile"))] = {name for name in names if name.startswith("ProfilerStep#")}
    return found


def test_the_chosen_steps_of_the_chosen_rank_are_recorded(digits, tmp_path):
    chosen = ("profiling.record=[torch]", "profiling.steps=[2, 3]", "profiling.ranks=[1]")
    train_on_ranks(config("vlm_digits", tmp_path, digits, "layout=two_processes", "train.iters=5", *chosen))
    assert traces(tmp_path) == {"rank_1/steps_2_3.pt.trace.json.gz": {"ProfilerStep#2", "ProfilerStep#3"}}


def test_a_run_that_ends_early_leaves_what_it_has_and_goes_on_recording(digits, tmp_path):
    chosen = ("profiling.record=[torch]", "profiling.steps=[3, 6]", "layout=one_process")
    train_on_ranks(config("vlm_digits", tmp_path, digits, "train.iters=8", "train.exit_interval=4", *chosen))
    train_on_ranks(config("vlm_digits", tmp_path, digits, "train.iters=8", *chosen))
    assert traces(tmp_path) == {
        "rank_0/steps_3_4.pt.trace.json.gz": {"ProfilerStep#3", "ProfilerStep#4"},
        "rank_0/steps_5_6.pt.trace.json.gz": {"ProfilerStep#5", "ProfilerStep#6"},
    }
