"""Loops of one's own, as docs/training-api.md shows them."""

import os
import re
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.dist.ranks import RankFailure, run_ranks
from tests.dist.runs import TINY, TINY_ENCODER, config, read_metrics

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


def _samples_and_timers(cfg) -> str:
    """Train with a forward step that compares its samples with `open_dataset` and has a timer; the repr of a step."""
    import time

    import torch

    from mimo_train.bridge.training.setup import setup
    from mimo_train.bridge.training.train import train
    from mimo_train.config.fault import UserError
    from mimo_train.dataset import open_dataset
    from mimo_train.step import mimo_step
    from mimo_train.step.state import GlobalState

    run, dataset, steps = setup(cfg), open_dataset(cfg), []
    data = run.train_data_iterator
    with pytest.raises(UserError, match=r"no step is current yet\. Call its advance\(\)"):
        next(data)

    def forward_step(state: GlobalState, data_iterator, model):
        timers = state.timers
        timers("my-work", log_level=1).start()
        time.sleep(0.01)
        timers("my-work").stop()
        with state.straggler_timer(bdata=True):
            batch = next(data_iterator)
        steps.append(repr(data.current))
        numbers = batch["sample_numbers"].tolist()
        assert set(numbers) <= set(dataset.step_samples(state.train_state.step + 1))
        for row, number in enumerate(numbers):
            sample = dataset[number]
            assert torch.equal(batch["input_ids"][row, : len(sample.input_ids)], sample.input_ids)
        with pytest.raises(KeyError, match="tokens: not in this microbatch. It has sample_numbers, input_ids, .*"):
            batch["tokens"]
        with state.straggler_timer:
            return mimo_step.forward_step(state, iter([batch]), model)

    train(forward_step, run.model, run.optimizer, run.scheduler, data, None, run.state, run.checkpointing_context)
    with pytest.raises(StopIteration, match=r"call advance\(\)"):
        next(data)
    run.close()
    return steps[-1]


def test_a_forward_step_sees_the_samples_of_open_dataset_and_its_timers_are_logged(digits, tmp_path):
    cfg = config("vlm_digits", tmp_path / "run", digits, "layout=one_process", "train.iters=2")
    (step,) = run_ranks(_samples_and_timers, 1, cfg)
    assert step.startswith("StepBatch(samples 16 to 31, images ") and len(step) < 200, step
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["timers/my-work"] > 0 for line in lines] == [True, True]


def test_a_step_beyond_the_last_is_named(digits, tmp_path):
    (stepping,) = [text for text in PROGRAMS if "train_step" in text]
    with pytest.raises(RankFailure, match="UserError: train_step: the 3 steps of train.iters have been made"):
        run_ranks(_program, 1, stepping, tmp_path, digits, 3)
