"""Loops of one's own, as docs/training-api.md shows them."""

import os
import re
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.dist.ranks import RankFailure, run_ranks
from tests.dist.runs import TINY, TINY_ENCODER

PAGE = Path(__file__).resolve().parents[3] / "docs" / "training-api.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def _program(text: str, folder: Path, demo: Path, steps: int, *, interrupted: bool = False) -> list[str]:
    """Run a program of the page, on a tiny model; returns the names of its checkpoints.

    Args:
        interrupted: Ctrl-C is pressed before the first step.
    """
    if interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        text = re.sub(
            r"^(run = setup.*)$", r"\1; import os, signal; os.kill(os.getpid(), signal.SIGINT)", text, flags=re.M
        )
    os.chdir(folder)
    overrides = (*TINY, *TINY_ENCODER, "run.dir=run", f"data.shards={demo}/train", "data.demo=")
    added = ", ".join(map(repr, (*overrides, "data.validation_shards=", f"train.iters={steps}")))
    before, found, after = text.partition('"layout=one_process"')
    assert found, "the page shows another config"
    program = compile(f"{before}{found}, {added}{after.replace(', "run.dir=runs/own"', '')}", PAGE.name, "exec")
    if interrupted and "train_step" in text:
        with pytest.raises(SystemExit) as ended:
            exec(program, {})
        assert ended.value.code == 0
    else:
        exec(program, {})
    return sorted(path.name for path in Path("run/checkpoints").glob("step_*"))


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_what_the_page_shows_runs(number, digits, tmp_path):
    run_ranks(_program, 1, PROGRAMS[number], tmp_path, digits, 10)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_ctrl_c_saves_in_the_programs_of_the_page(number, digits, tmp_path):
    interrupted = partial(_program, PROGRAMS[number], tmp_path, digits, 10, interrupted=True)
    assert run_ranks(interrupted, 1) == [["step_00000001"]]


def test_a_step_beyond_the_last_is_named(digits, tmp_path):
    (stepping,) = [text for text in PROGRAMS if "train_step" in text]
    with pytest.raises(RankFailure, match="UserError: train_step: the 3 steps of train.iters have been made"):
        run_ranks(_program, 1, stepping, tmp_path, digits, 3)
