"""Where modules stand never changes the numbers: mixed placements, and processes without a module."""

import os

import pytest

from data.demo import make_demo
from mimo_train.layout import plan
from mimo_train.metrics.jsonl import read_metrics
from tests.dist.ranks import run_ranks
from tests.dist.runs import config, curve, train_rank

IDLE = ("placement.first_rank={images: 1, language: 3}", "placement.allow_idle=true", "modules.language.layout.tp=2")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return make_demo(tmp_path_factory.mktemp("digits"), train_samples=240, held_out_samples=20, shards=2)


def test_processes_without_a_module_end_and_the_others_number_themselves(digits, tmp_path):
    def train(name: str, processes: int, *overrides: str) -> tuple[list, list[tuple]]:
        cfg = config("vlm_digits", tmp_path / name, digits, "layout=two_processes", "train.iters=5", *overrides)
        ends = run_ranks(rank_and_code, processes, cfg)
        return ends, curve(read_metrics(tmp_path / name / "metrics.jsonl"))

    _, packed = train("packed", 3, "modules.language.layout.tp=2")
    ends, spread = train("spread", 6, *IDLE)
    # Of the launcher's processes 0 to 5, numbers 1, 3 and 4 have a module.
    assert ends == [("0", "6", 0), ("0", "3", 0), ("2", "6", 0), ("1", "3", 0), ("2", "3", 0), ("5", "6", 0)]
    assert spread == packed


def rank_and_code(cfg) -> tuple[str, str, int]:
    """(RANK, WORLD_SIZE, exit code) of this process after a run."""
    code = train_rank(cfg)
    return os.environ["RANK"], os.environ["WORLD_SIZE"], code


def test_holes_are_no_part_of_the_layout(digits, tmp_path):
    layout = plan(config("vlm_digits", tmp_path, digits, "layout=two_processes", *IDLE))
    assert layout.processes == (1, 3, 4) and layout.world_size == 3
    assert list(layout.modules["images"].ranks) == [0] and list(layout.language.ranks) == [1, 2]
