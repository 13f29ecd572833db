"""Loops of one's own, as docs/training-api.md shows them."""

import os
import re
from pathlib import Path

import pytest

from tests.dist.ranks import RankFailure, run_ranks
from tests.dist.runs import TINY, TINY_ENCODER

PAGE = Path(__file__).resolve().parents[3] / "docs" / "training-api.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def _program(text: str, folder: Path, demo: Path, steps: int) -> None:
    """Run a program of the page, on a tiny model."""
    os.chdir(folder)
    overrides = (*TINY, *TINY_ENCODER, "run.dir=run", f"data.shards={demo}/train", "data.demo=")
    added = ", ".join(map(repr, (*overrides, "data.validation_shards=", f"train.iters={steps}")))
    before, found, after = text.partition('"layout=one_process"')
    assert found, "the page shows another config"
    exec(compile(f"{before}{found}, {added}{after.replace(', "run.dir=runs/own"', '')}", PAGE.name, "exec"), {})


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_what_the_page_shows_runs(number, digits, tmp_path):
    run_ranks(_program, 1, PROGRAMS[number], tmp_path, digits, 10)


def test_a_step_beyond_the_last_is_named(digits, tmp_path):
    (stepping,) = [text for text in PROGRAMS if "train_step" in text]
    with pytest.raises(RankFailure, match="UserError: train_step: the 3 steps of train.iters have been made"):
        run_ranks(_program, 1, stepping, tmp_path, digits, 3)
