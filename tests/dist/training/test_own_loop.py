"""Loops of one's own, as docs/training-api.md shows them."""

import os
import re
import signal
from functools import partial
from pathlib import Path

import pytest

from mimo_train.logging.sinks.jsonl import read_metrics
from tests.dist.ranks import RankFailure, run_ranks
from tests.dist.runs import TINY, TINY_ENCODER, TOLERANCE, config, train_on_ranks

PAGE = Path(__file__).resolve().parents[3] / "docs" / "training-api.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def _program(
    text: str, folder: Path, demo: Path, steps: int, *layout: str, interrupted: bool = False, goes_on: bool = False
) -> list[str]:
    """Run a program of the page, on a tiny model; returns the names of its checkpoints.

    Args:
        layout: overrides, instead of the layout of the page.
        interrupted: Ctrl-C is pressed before the first step.
        goes_on: the program does not end its loop then.
    """
    if interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        text = re.sub(
            r"^(run = setup.*)$", r"\1; import os, signal; os.kill(os.getpid(), signal.SIGINT)", text, flags=re.M
        )
    if goes_on:
        text, ends = re.subn(r"(checkpoint_and_decide_exit\(.*\):\n +)break", r"\1pass", text)
        assert ends == 1, "the page ends its loop in another way"
    os.chdir(folder)
    overrides = (*TINY, *TINY_ENCODER, "run.dir=run", f"data.shards={demo}/train", "data.demo=")
    layout = layout or ("layout=one_process",)
    added = ", ".join(map(repr, (*layout, *overrides, "data.validation_shards=", f"train.iters={steps}")))
    before, found, after = text.partition('"layout=one_process"')
    assert found, "the page shows another config"
    program = compile(f"{before}{added}{after.replace(', "run.dir=runs/own"', '')}", PAGE.name, "exec")
    if goes_on:
        with pytest.raises(SystemExit) as ended:
            exec(program, {})
        assert ended.value.code == 0
    else:
        exec(program, {})
    return sorted(path.name for path in Path("run/checkpoints").glob("step_*"))


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_what_the_page_shows_runs(number, digits, tmp_path):
    run_ranks(_program, 1, PROGRAMS[number], tmp_path, digits, 10)


def test_the_forward_step_of_the_page_gives_the_same_numbers_at_any_layout(digits, tmp_path):
    (program,) = [text for text in PROGRAMS if "def loss_func" in text]

    def losses(ranks: int, *layout: str) -> list[tuple[float, float, float]]:
        folder = tmp_path / str(ranks)
        folder.mkdir()
        run_ranks(_program, ranks, program, folder, digits, 4, *layout)
        lines = read_metrics(folder / "run" / "metrics.jsonl")
        return [(line["focal loss"], line["lm loss"], line["grad_norm"]) for line in lines]

    one = losses(1)
    assert all(0 < focal < cross_entropy for focal, cross_entropy, _ in one) and one[-1][0] < one[0][0]
    piped = losses(3, "layout=two_processes", "modules.language.layout.pp=2")
    assert piped == [pytest.approx(line, rel=TOLERANCE) for line in one]


@pytest.mark.parametrize("number", [number for number, text in enumerate(PROGRAMS) if "setup(" in text])
def test_ctrl_c_saves_in_the_programs_of_the_page(number, digits, tmp_path):
    interrupted = partial(_program, PROGRAMS[number], tmp_path, digits, 10, interrupted=True)
    assert run_ranks(interrupted, 1) == [["step_00000001"]]


def _samples_and_timers(cfg) -> str:
    """Train with a forward step that compares its samples with `open_dataset` and has a timer; the repr of a step."""
    import time

    import torch

    from mimo_train.bridge.training.setup import setup
    from mimo_train.bridge.training.train import train
    from mimo_train.config.errors import UserError
    from mimo_train.run_dataset import open_dataset
    from mimo_train.training.step import forward_step as mimo_step
    from mimo_train.training.step.state import GlobalState

    run, dataset, steps = setup(cfg), open_dataset(cfg), []
    data = run.train_data_iterator
    assert "step=0" in repr(run.state) and len(repr(run.state)) < 2000
    with pytest.raises(UserError, match=r"no step is current yet\. Call its advance\(\)"):
        next(data)
    with pytest.raises(UserError, match="valid_data_iterator: next"):
        next(run.valid_data_iterator)
    opened = run.valid_data_iterator()
    opened.advance()
    assert torch.equal(next(opened)["input_ids"][0][:4], open_dataset(cfg, split="validation")[0].input_ids[:4])
    opened.close()

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
            return mimo_step.mimo_forward_step(state, iter([batch]), model)

    train(forward_step, run.model, run.optimizer, run.scheduler, data, None, run.state, run.checkpointing_context)
    with pytest.raises(StopIteration, match=r"call advance\(\)"):
        next(data)
    run.close()
    return steps[-1]


def test_a_forward_step_sees_the_samples_of_open_dataset_and_its_timers_are_logged(digits, tmp_path):
    cfg = config(
        "vlm_digits",
        tmp_path / "run",
        digits,
        "layout=one_process",
        "train.iters=2",
        f"data.validation_shards={digits}/held_out",
    )
    (step,) = run_ranks(_samples_and_timers, 1, cfg)
    assert step.startswith("StepBatch(samples 16 to 31, images ") and len(step) < 200, step
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["timers/my-work"] > 0 for line in lines] == [True, True]


def test_ctrl_c_saves_in_a_loop_that_goes_on(digits, tmp_path):
    (stepping,) = [text for text in PROGRAMS if "train_step" in text]
    interrupted = partial(_program, stepping, tmp_path, digits, 10, interrupted=True, goes_on=True)
    assert run_ranks(interrupted, 1) == [["step_00000001"]]


def test_a_step_beyond_the_last_is_named(digits, tmp_path):
    cfg = config("vlm_digits", tmp_path, digits, "layout=one_process", "train.iters=1")
    with pytest.raises(RankFailure, match="UserError: train_step: the 1 steps of train.iters have been made"):
        run_ranks(_step_beyond, 1, cfg)


EVERYTHING = ("log.throughput_window=2", "log.runtime_unit=seconds", "log.metrics=[straggler]", "train.log_interval=2")
AT_ANY_TIME = ("tokens_per_second", "seconds", "_per_sec", "straggler/", "tflops", "mfu", "hfu", "current_resident_mem")


def _steps(cfg, stop: int) -> list[int]:
    """Make the steps up to `stop` as a ported program does, save, and return the sample that each began with."""
    from mimo_train.bridge.training.mimo_step import forward_step
    from mimo_train.bridge.training.setup import setup
    from mimo_train.bridge.training.train import save_checkpoint_and_time, train_step
    from mimo_train.bridge.training.utils.train_utils import prepare_forward_step_func, training_log

    run = setup(cfg)
    state, data, progress = run.state, run.train_data_iterator, run.state.train_state
    parts, first_samples = (run.model, run.optimizer, run.scheduler), []
    step_func, totals = prepare_forward_step_func(forward_step, state), {}
    while progress.step < stop:
        rates = run.scheduler.learning_rates()
        losses, skipped, _, _, _, norm, zeros = train_step(step_func, data, *parts, state)
        first_samples.append(data.current.first_sample)
        progress.step += 1
        progress.consumed_train_samples += cfg.train.global_batch_size  # as the loop of Megatron-Bridge does
        history = ([], None, [99.0])[progress.step % 3]
        training_log(
            losses, totals, rates, None, 1.0, False, skipped, norm, None, zeros, cfg, state, history, run.model
        )
    save_checkpoint_and_time(
        state, *parts, progress.floating_point_operations_so_far, {}, train_data_iterator=run.train_data_iterator
    )
    run.close()
    return first_samples


def _numbers(lines: list[dict]) -> list[dict]:
    """What does not depend on how fast the machine is."""
    timed = ("time/", *AT_ANY_TIME)
    kept = ("time/tokens", "time/samples", "time/batches")
    return [
        {name: value for name, value in line.items() if name in kept or not any(word in name for word in timed)}
        for line in lines
    ]


def test_steps_of_ones_own_are_logged_saved_and_resumed_as_those_of_pretrain(digits, tmp_path):
    def cfg(name: str):
        return config("vlm_digits", tmp_path / name, digits, "layout=two_processes", "train.iters=6", *EVERYTHING)

    expected = train_on_ranks(cfg("pretrain"))
    assert run_ranks(_steps, 2, cfg("own"), 3) == [[0, 16, 32]] * 2
    assert run_ranks(_steps, 2, cfg("own"), 6) == [[48, 64, 80]] * 2
    lines = read_metrics(tmp_path / "own" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert _numbers(lines) == _numbers(expected) and lines[-1]["time/tokens"] > 0
    for line in lines:
        assert line["time/images/compute"] > 0 and line["time/language/optimizer"] > 0
        assert line["straggler/language/slowest_over_median"] >= 1
        assert 0 < line["step_seconds"] < 90


def _step_beyond(cfg) -> None:
    from mimo_train.bridge.training.setup import setup
    from mimo_train.bridge.training.train import train_step
    from mimo_train.bridge.training.utils.train_utils import prepare_forward_step_func
    from mimo_train.training.pretrain import default_forward_step

    run = setup(cfg)
    step_func, data = prepare_forward_step_func(default_forward_step(cfg), run.state), run.train_data_iterator
    parts = (step_func, data, run.model, run.optimizer, run.scheduler, run.state)
    train_step(*parts)
    assert run.state.train_state.consumed_train_samples == data.consumed_samples == 16
    data.put_back()  # as a step is that asks to exit: it is made again
    assert data.consumed_samples == 0
    train_step(*parts)
    assert data.current.first_sample == 0 and data.consumed_samples == 16
    run.state.train_state.step += 1
    train_step(*parts)


def _step_with_infinite_loss(cfg) -> None:
    from mimo_train.bridge.training.mimo_step import forward_step
    from mimo_train.bridge.training.setup import setup
    from mimo_train.bridge.training.train import train_step

    run = setup(cfg)

    def infinite_step(data_iterator, model):
        output, loss_func = forward_step(run.state, data_iterator, model)
        return output, loss_func and (lambda tensor: (loss_func(tensor)[0] * float("inf"), *loss_func(tensor)[1:]))

    train_step(infinite_step, run.train_data_iterator, run.model, run.optimizer, run.scheduler, run.state)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.on_nan=raise", "NonFiniteStep: train.on_nan=raise: step 1: a gradient is not finite"),
        ("train.skip_iters=[1]", r"UserError: train.skip_iters: is \[1\], and train_step skips no step"),
    ],
)
def test_a_step_of_ones_own_ignores_no_key(override, message, digits, tmp_path):
    cfg = config("vlm_digits", tmp_path, digits, "layout=two_processes", "train.iters=1", override)
    with pytest.raises(RankFailure, match=message):
        run_ranks(_step_with_infinite_loss, 2, cfg)
