"""Runs of several modules that hang in six ways: the report has the rank, the phase and the edge. By default the
telling ones; with MIMO_ALL_HANGS=1 all, over three layouts."""

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mimo_train.flight.blame import PAUSE, report
from mimo_train.flight.file_format import BACKWARD
from mimo_train.flight.recorder import RECORDER
from mimo_train.flight.watchdog import FOR_STACKS, HANG_CODE
from tests.dist.flight.hangs import REPORT_AFTER, HangingRun, endless, hangs_now
from tests.dist.ranks import run_ranks
from tests.dist.runs import config, train_rank
from tests.hang import HANG_SECONDS

ALL = bool(os.environ.get("MIMO_ALL_HANGS"))
on_demand = pytest.mark.skipif(not ALL, reason="MIMO_ALL_HANGS=1 runs it")
SECONDS = "seconds to the report"
"""For benchmarks/hangs.py: the tests bound no time."""
TWO, FOUR = "layout=two_processes", "layout=images_tp2_language_pp2"


def for_ever(cfg) -> None:
    """What never happens is waited for."""
    hangs_now(cfg)
    threading.Event().wait()


def never_joins(cfg) -> int:
    """Rank 1 is stuck before it has met the others."""
    if os.environ["RANK"] == "1":
        import mimo_train.training.setup as setup

        setup.start_processes = lambda *_: for_ever(cfg)
    return train_rank(cfg)


def reads_for_ever_at_start(cfg) -> int:
    """Rank 1 waits for the second shard while it indexes, and rank 0 for that index."""
    if os.environ["RANK"] == "1":
        import data.index.indexing as index

        walk = index.walk_tar
        index.walk_tar = lambda shard, *rest: for_ever(cfg) if "000001" in shard.name else walk(shard, *rest)
    else:
        import data.samples.shard_dataset as dataset

        opened = dataset.open_catalogue

        def later(*arguments):
            while not [*Path(cfg.data.cache_dir).glob("*.lock")]:
                time.sleep(0.01)
            return opened(*arguments)

        dataset.open_catalogue = later
    return train_rank(cfg)


def reads_for_ever_in_evaluation(cfg) -> int:
    """Rank 1 waits for a held-out sample."""
    if os.environ["RANK"] == "1":
        from data.storage.files import READS
        from data.storage.reader import ShardReader

        read = ShardReader.read

        def waits(self, path, *arguments):
            if "held_out" in str(path):
                with READS.of(path):
                    for_ever(cfg)
            return read(self, path, *arguments)

        ShardReader.read = waits
    return train_rank(cfg)


def writes_for_ever(cfg) -> int:
    """Rank 1 waits for the disk while it saves."""
    if os.environ["RANK"] == "1":
        from mimo_train.checkpoint.format import files

        files.write_all = lambda *_: for_ever(cfg)
    return train_rank(cfg)


def leaves_messages_out(cfg) -> int:
    """Rank 1 does not exchange gradients of step 3's second microbatch."""
    if os.environ["RANK"] == "1":
        from mimo_train.parallel.bridge.exchange import Bridge

        exchange = Bridge._exchange

        def forgets(self, given, taken=None, parts=()):
            if RECORDER.step == 3 and RECORDER._direction == BACKWARD and RECORDER._microbatch == 1:
                hangs_now(cfg)
                given, parts = [], ()
            exchange(self, given, taken, parts)

        Bridge._exchange = forgets
    return train_rank(cfg)


def leaves_a_sum_out(cfg) -> int:
    """Rank 1 does not take part in the sum at the end of step 3."""
    if os.environ["RANK"] == "1":
        import mimo_train.training.train_step as step_sum

        all_reduce = step_sum.dist.all_reduce

        def forgets(tensor):
            if RECORDER.step != 3:
                all_reduce(tensor)
            else:
                hangs_now(cfg)

        # Of this file alone: `dist` is torch's module.
        step_sum.dist = SimpleNamespace(all_reduce=forgets)
    return train_rank(cfg)


def start(tmp_path, digits, function=train_rank, *overrides: str) -> HangingRun:
    held_out = f"data.validation_shards={digits}/held_out"
    places = (held_out, f"data.cache_dir={tmp_path}/index")  # so that every run indexes
    return HangingRun(endless(tmp_path / "run", f"{digits}/train", *places, *overrides), function)


@pytest.mark.parametrize(
    ("layout", "rank", "step"),
    [
        (TWO, 1, 3),
        *(
            pytest.param(*case, marks=on_demand)
            for case in ((TWO, 0, 3), (FOUR, 1, 2), (FOUR, 3, 2), ("layout=images_dp2_language_dp2", 1, 2))
        ),
    ],
)
def test_a_stopped_rank_is_blamed_not_the_one_that_waits_for_it(tmp_path, digits, layout, rank, step, record_property):
    with start(tmp_path, digits, train_rank, layout) as run:
        run.until_step(step)
        run.stop(rank)
        text = run.report()
        record_property(SECONDS, run.seconds())
        waiting = next(number for number in range(len(run.processes)) if number != rank)
        run.processes[waiting].join(HANG_SECONDS)
        assert run.processes[waiting].exitcode == HANG_CODE
    assert f"to blame: rank {rank} is stopped" in text
    assert f"waits for rank {rank}: " in text and "loop > step" in text


@pytest.mark.parametrize(
    ("function", "overrides", "words"),
    [
        (leaves_messages_out, [TWO], ["images->language, microbatch 1"]),
        (reads_for_ever_in_evaluation, [TWO, "train.eval_interval=2"], ["evaluate", "held_out", "data_wait"]),
        pytest.param(reads_for_ever_at_start, [TWO], ["index", "000001.tar"], marks=on_demand),
        pytest.param(never_joins, [TWO], ["start", "for_ever", "rank 0 waits for it"], marks=on_demand),
        *(
            pytest.param(writes_for_ever, [TWO, "checkpoint.save_interval=2", f"checkpoint.asynchronous={beside}"],
                         ["save", "for_ever"], marks=on_demand)
            for beside in ("true", "false")
        ),
    ],
)  # fmt: skip
def test_a_hang_is_reported_with_rank_phase_and_edge(tmp_path, digits, function, overrides, words, record_property):
    with start(tmp_path, digits, function, *overrides) as run:
        text = run.report()
        record_property(SECONDS, run.seconds())
    blamed = text.partition("ranks:\n")[0]
    assert "to blame: rank" in blamed and "rank 1" in blamed.splitlines()[1], text
    for word in words:
        assert word in text, (word, text)


def makes_its_own_steps(cfg) -> None:
    """A program that rests on rank 1 behind its first step, while rank 0 waits for it in the next one, and hangs there
    inside of its third."""
    from mimo_train.bridge.training.setup import setup
    from mimo_train.bridge.training.train import train_step
    from mimo_train.training.step.forward_step import mimo_forward_step, prepare_forward_step_func

    run = setup(cfg)
    step = prepare_forward_step_func(mimo_forward_step, run.state)
    is_last = os.environ["RANK"] == "1"
    while True:
        done = run.state.train_state.step
        if is_last and done == 1:
            time.sleep(2 * REPORT_AFTER + FOR_STACKS + PAUSE)
        if is_last and done == 2:
            step = lambda *_: for_ever(cfg)  # noqa: E731
        train_step(step, run.train_data_iterator, run.model, run.optimizer, run.scheduler, run.state)
        run.state.train_state.step += 1


def test_a_program_that_makes_its_own_steps_may_rest_between_them_and_is_watched_inside(tmp_path, digits):
    with start(tmp_path, digits, makes_its_own_steps, TWO) as run:
        run.until(lambda ranks: 1 in ranks and ranks[1].step == 1 and ranks[1].phases == ("caller",))
        text = run.report()
        run.processes[0].join(HANG_SECONDS)
        assert run.processes[0].exitcode == HANG_CODE
    blamed = text.partition("ranks:\n")[0]
    assert "to blame: rank 1" in blamed and "step 3, loop" in blamed and "for_ever" in blamed, text


@on_demand
def test_a_collective_left_out_is_found_in_the_files_of_the_dead_run(tmp_path, digits, record_property):
    with start(tmp_path, digits, leaves_a_sum_out, TWO) as run:
        for process in run.processes:
            process.join(HANG_SECONDS)
        record_property(SECONDS, run.seconds())
    text = report(run.run_dir)
    assert "to blame: collective #" in text and "on rank 1" in text and "is not the same on all ranks" in text


def timeouts_of_groups(cfg) -> list[set[float]]:
    """Seconds of all process groups of a run, at the start of each step and of the training of the last."""
    import torch
    import torch.distributed as dist

    from mimo_train.training.callbacks import Callback
    from mimo_train.training.pretrain import pretrain

    found = []

    class Timeouts(Callback):
        def on_step_start(self, state):
            backends = (group._get_backend(torch.device("cpu")) for group in dist.distributed_c10d._world.pg_map)
            found.append({backend.options._timeout.total_seconds() for backend in backends})

    assert pretrain(cfg, callbacks=[Timeouts()]) == 0
    return found


def test_the_time_limit_reaches_all_groups(tmp_path, digits):
    options = ("layout=two_processes", "train.iters=2", "run.timeout_minutes=7")
    assert run_ranks(timeouts_of_groups, 2, config("vlm_digits", tmp_path, digits, *options)) == 2 * [2 * [{420.0}]]
