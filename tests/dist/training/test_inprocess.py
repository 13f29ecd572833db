"""In-process restart: a rank fails, and the run goes on inside the same processes."""

import os
import threading
import weakref
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from mimo_train.logging.sinks.jsonl import read_metrics
from tests.dist.ranks import RankFailure, run_ranks
from tests.dist.runs import config, curve, train_on_ranks

pytest.importorskip("nvidia_resiliency_ext.inprocess")


def _train_with_failures(cfg, failing_rank: int, failures: int, torchrun: bool = True) -> tuple[int, int, int]:
    """(exit code, lives, lives whose model is still in memory) of a rank of a run, of which one rank fails after
    step 5 in its first lives, and writes no checkpoint behind the first until it has failed."""
    import torch.distributed as dist

    from mimo_train.checkpoint import save as saves
    from mimo_train.training.callbacks import Callback
    from mimo_train.training.pretrain import pretrain

    class Fails(Callback):
        lives = left = 0
        previous, failed = None, threading.Event()

        def on_failure(self, state, error):
            self.failed.set()

        def on_train_start(self, state, model):
            self.lives += 1
            self.left += self.previous is not None and self.previous() is not None
            self.previous = weakref.ref(model[0])

        def on_step_end(self, state, result):
            if state.train_state.step == 5 and self.lives <= failures and dist.get_rank() == failing_rank:
                raise RuntimeError("a fault of this test")

    if not torchrun:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    callback, write = Fails(), saves.write_rank
    if torchrun and int(os.environ["RANK"]) == failing_rank:
        saves.write_rank = lambda folder, *rest: (
            ("00000004" not in folder.name or callback.failed.wait()) and write(folder, *rest)
        )
    return pretrain(cfg, callbacks=[callback]), callback.lives, callback.left


@pytest.fixture
def cfg(digits, tmp_path):
    """Makes a run of six steps that may start again once."""

    def make(layout: str, name: str = "run"):
        overrides = (f"layout={layout}", "train.iters=6", "checkpoint.save_interval=2", "run.timeout_minutes=5")
        beside = ("run.inprocess_restarts=1", "checkpoint.asynchronous=true")
        return config("vlm_digits", tmp_path / name, digits, *overrides, *beside)

    return make


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_failed_run_goes_on_in_its_processes_to_the_same_numbers(failing_rank, cfg, tmp_path):
    """With a save in flight, which is completed if rank 0 sees all parts in time."""
    cfg = cfg("two_processes")
    results = run_ranks(_train_with_failures, 2, cfg, failing_rank, 1)
    assert results == [(0, 2, 0), (0, 2, 0)]
    whole = replace(cfg, run=replace(cfg.run, dir=str(tmp_path / "whole"), inprocess_restarts=0))
    assert curve(read_metrics(Path(cfg.run.dir) / "metrics.jsonl")) == curve(train_on_ranks(whole))
    starts = [line for line in (tmp_path / "run" / "progress.txt").read_text().splitlines() if "\tstart\t" in line]
    first, second = (line.split("\tstep=")[1].split("\t")[0] for line in starts)
    assert first == "0" and second in ("2", "4")


def _fails_inside_of_a_layer(cfg) -> int:
    """The last rank fails in step 3, in a layer whose sum the rank beside it waits for; that wait has two seconds
    instead of `run.timeout_minutes`."""
    import torch.distributed as dist
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from mimo_train.flight.recorder import RECORDER
    from mimo_train.training.pretrain import pretrain

    forward, failed = TransformerLayer.forward, []

    def fails_once(layer, *arguments, **options):
        group = layer.pg_collection.tp
        if RECORDER.step == 3 and not failed and group.size() > 1:
            failed.append(True)
            if group.rank() == 1:
                raise RuntimeError("a fault of this test")
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), group)
        return forward(layer, *arguments, **options)

    TransformerLayer.forward = fails_once
    return pretrain(cfg)


def test_a_rank_that_waits_inside_of_a_layer_is_freed_by_the_time_limit_of_its_group(cfg, tmp_path):
    cfg = cfg("images_dp1_language_tp2")
    assert run_ranks(_fails_inside_of_a_layer, 3, cfg) == [0, 0, 0]
    whole = replace(cfg, run=replace(cfg.run, dir=str(tmp_path / "whole"), inprocess_restarts=0))
    assert curve(read_metrics(Path(cfg.run.dir) / "metrics.jsonl")) == curve(train_on_ranks(whole))


def test_after_the_last_restart_the_run_fails(cfg):
    cfg = cfg("two_processes")
    with pytest.raises(RankFailure):
        run_ranks(_train_with_failures, 2, cfg, 1, 2)
    lines = read_metrics(Path(cfg.run.dir) / "metrics.jsonl")
    assert [line["step"] for line in lines][-1] == 5


def test_one_process_needs_no_torchrun_and_fails_with_its_own_error(cfg):
    assert run_ranks(_train_with_failures, 1, cfg("one_process"), 0, 1, False) == [(0, 2, 0)]
    with pytest.raises(RankFailure, match="RuntimeError: a fault of this test"):
        run_ranks(_train_with_failures, 1, cfg("one_process", "broken"), 0, 2, False)
