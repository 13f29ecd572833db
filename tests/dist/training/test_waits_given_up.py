"""A run that is asked to end while it waits for data: it saves the last step that it has made, ends with its usual exit
code, and goes on to the curve of an unbroken run."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from mimo_train.checkpoint import folders
from mimo_train.layout.run import resolve
from mimo_train.logging.sinks.jsonl import read_metrics
from mimo_train.training.callbacks import Callback
from tests.dist.ranks import run_ranks, started_ranks
from tests.dist.runs import config, curve
from tests.hang import HANG_SECONDS

ENCODER, LANGUAGE = 0, 1
BOTH = (ENCODER, LANGUAGE)
STOPPED = 75
STEPS, SIZE = 9, 16


def cfg_of(digits, run_dir, *overrides: str):
    return config(
        "vlm_digits",
        run_dir,
        digits,
        "layout=two_processes",
        "data.pad=sequence",
        "data.shuffle=false",
        "data.workers=2",
        f"train.global_batch_size={SIZE}",
        "train.micro_batch_size=4",
        f"train.iters={STEPS}",
        "checkpoint.keep=0",
        *overrides,
    )


class Steps(Callback):
    """Knows which step is being made, 0 before the first."""

    step = 0

    def on_step_start(self, state):
        self.step = state.train_state.step + 1


def _rank(cfg, folder: Path, ends_at: int = -1, stalls: tuple[int, ...] = (), signalled: tuple[int, ...] = ()) -> None:
    """Run one rank as `mimo-train train` does. On ranks `stalls` no sample behind step `ends_at` can be read. When one
    of them has waited in that step for long enough to look whether to go on, it leaves a file, at which the ranks
    `signalled` signal themselves."""
    from data.samples.shard_dataset import ShardDataset
    from data.workers import LOOK_SECONDS, Wait, WaitGivenUp
    from mimo_train.commands.train import main
    from mimo_train.training import pretrain

    os.environ["MIMO_STOPPED_CODE"] = str(STOPPED)
    rank, look, train, steps = int(os.environ["RANK"]), Wait.look, pretrain.pretrain, Steps()
    given_up = threading.Event()
    pretrain.pretrain = lambda run, **options: train(run, callbacks=[steps], **options)

    def stalling(read):
        def stall_and_read(samples, number, *module):
            if number >= ends_at * SIZE:
                given_up.wait()
            return read(samples, number, *module)

        return stall_and_read

    if rank in stalls:
        ShardDataset.read_text = stalling(ShardDataset.read_text)
        ShardDataset.read_media = stalling(ShardDataset.read_media)

    def look_and_tell(wait):
        if rank in stalls and steps.step == ends_at and time.monotonic() > wait._began + LOOK_SECONDS:
            (folder / f"waits_{rank}").touch()
        try:
            look(wait)
        except WaitGivenUp:
            given_up.set()
            raise

    def signal_itself():
        while not list(folder.glob("waits_*")):
            time.sleep(0.05)
        time.sleep(0.2)  # in which a rank that does not wait has come to its step
        os.kill(os.getpid(), signal.SIGTERM)

    Wait.look = look_and_tell
    if rank in signalled:
        threading.Thread(target=signal_itself, daemon=True).start()
    os._exit(main(resolve(cfg)))


def exit_codes(cfg, *arguments) -> list[int | None]:
    """Return how two ranks that call `_rank` end."""
    with started_ranks(_rank, 2, cfg, *arguments) as processes:
        for process in processes:
            process.join(HANG_SECONDS)
        return [process.exitcode for process in processes]


@pytest.fixture(scope="module")
def unbroken(digits, tmp_path_factory):
    """Return the curve of a run that nothing has stopped, with its overrides."""
    curves = {}

    def of(*overrides):
        if overrides not in curves:
            run_dir = tmp_path_factory.mktemp("unbroken")
            assert exit_codes(cfg_of(digits, run_dir, *overrides), run_dir) == [0, 0]
            curves[overrides] = curve(read_metrics(run_dir / "metrics.jsonl"))
            assert curves[overrides][-1][0] == STEPS
        return curves[overrides]

    return of


@pytest.mark.parametrize(
    ("ends_at", "stalls", "signalled", "overrides"),
    [
        pytest.param(4, BOTH, BOTH, (), id="every rank waits and is asked"),
        pytest.param(4, BOTH, (LANGUAGE,), (), id="every rank waits and one is asked"),
        pytest.param(4, (ENCODER,), (LANGUAGE,), (), id="one waits and the other is asked inside of its step"),
        pytest.param(4, (LANGUAGE,), (ENCODER,), (), id="the same the other way round"),
        pytest.param(4, BOTH, (ENCODER,), ("train.skip_iters=[4,5]",), id="in a step that is passed over"),
        pytest.param(0, (ENCODER,), BOTH, (), id="before the first step"),
    ],
)
def test_a_run_that_waits_for_its_samples_saves_and_ends(
    digits, unbroken, tmp_path, ends_at, stalls, signalled, overrides
):
    cfg = cfg_of(digits, tmp_path, *overrides)
    assert exit_codes(cfg, tmp_path, ends_at, stalls, signalled) == [STOPPED, STOPPED]
    assert {path.name for path in tmp_path.glob("waits_*")} == {f"waits_{rank}" for rank in stalls}
    newest = folders.newest(tmp_path)
    assert (newest and newest.name) == (f"step_{ends_at:08d}" if ends_at else None)
    line = (tmp_path / "progress.txt").read_text().splitlines()[-1].split("\t")
    assert line[1:] == ["exit", f"step={ends_at}", "reason=signal"]

    assert exit_codes(cfg, tmp_path) == [0, 0]
    assert curve(read_metrics(tmp_path / "metrics.jsonl")) == unbroken(*overrides)


def _evaluating_rank(cfg, hangs_on: int, signalled: int) -> int:
    """One rank as `mimo-train train` runs it. On rank `hangs_on` no held-out text is read, and while it waits rank
    `signalled` signals itself."""
    from data.samples.shard_dataset import ShardDataset
    from mimo_train.commands.train import main
    from mimo_train.evaluation.held_out import HeldOut

    os.environ["MIMO_STOPPED_CODE"] = str(STOPPED)
    rank, evaluate, read_text, held_out = int(os.environ["RANK"]), HeldOut.evaluate, ShardDataset.read_text, []

    def evaluate_and_signal(self, *arguments):
        if rank == hangs_on:
            held_out.append(self.dataset)
        if rank == signalled:
            threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGTERM]).start()
        return evaluate(self, *arguments)

    def hang_or_read(samples, number):
        if samples in held_out:
            threading.Event().wait()
        return read_text(samples, number)

    HeldOut.evaluate, ShardDataset.read_text = evaluate_and_signal, hang_or_read
    return main(resolve(cfg))


@pytest.mark.parametrize(("hangs_on", "signalled"), [(LANGUAGE, LANGUAGE), (LANGUAGE, ENCODER)])
def test_an_evaluation_that_waits_is_given_up(digits, tmp_path, hangs_on, signalled):
    held_out = (f"data.validation_shards={digits}/held_out", "train.eval_interval=2", "data.workers=1")
    cfg = config("vlm_digits", tmp_path / "run", digits, "layout=two_processes", "train.iters=5", *held_out)
    with started_ranks(_evaluating_rank, 2, cfg, hangs_on, signalled) as processes:
        for process in processes:
            process.join(HANG_SECONDS)
        assert processes[hangs_on].exitcode == STOPPED, "what hangs is left behind"
        assert processes[1 - hangs_on].exitcode == 0, "of `started_ranks`"
    line = (tmp_path / "run" / "progress.txt").read_text().splitlines()[-1].split("\t")
    assert line[1:] == ["exit", "step=2", "reason=signal"], "saved at the step of the evaluation"
    assert run_ranks(_evaluating_rank, 2, cfg, -1, -1) == [0, 0]
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [point[0] for point in curve(lines)] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in lines if "eval/loss" in line] == [2, 4, 5], "the one that was stopped is repeated"


def _counting_rank(cfg, signalled: int) -> int:
    """One rank as `mimo-train train` runs it; rank `signalled` has a signal before it counts texts."""
    from mimo_train.commands.train import main
    from mimo_train.training import setup as setting_up

    os.environ["MIMO_STOPPED_CODE"], rank, count_texts = str(STOPPED), int(os.environ["RANK"]), setting_up.count_texts

    def signal_and_count(*arguments):
        if rank == signalled:
            os.kill(os.getpid(), signal.SIGTERM)
        count_texts(*arguments)

    setting_up.count_texts = signal_and_count
    return main(resolve(cfg))


def test_a_stop_while_texts_are_counted_ends_every_rank(digits, tmp_path):
    options = ("layout=two_processes", "train.iters=2", f"data.cache_dir={tmp_path}/cache")
    cfg = config("vlm_digits", tmp_path / "run", digits, *options)
    assert run_ranks(_counting_rank, 2, cfg, 0) == [STOPPED, STOPPED]
    assert not (tmp_path / "run" / "progress.txt").exists(), "nothing has begun"
    assert run_ranks(_counting_rank, 2, cfg, -1) == [0, 0]
    assert [point[0] for point in curve(read_metrics(tmp_path / "run" / "metrics.jsonl"))] == [1, 2]
