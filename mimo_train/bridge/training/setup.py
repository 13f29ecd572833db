"""`setup`: build a run and return the parts that the documented functions take."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule

from mimo_train.bridge.training.state import SessionState
from mimo_train.config.errors import UserError
from mimo_train.config.schema import ConfigContainer
from mimo_train.evaluation.held_out import HeldOut
from mimo_train.flight.file_format import CALLER
from mimo_train.flight.recorder import RECORDER
from mimo_train.launch.exit_signal import ExitSignal
from mimo_train.launch.processes import require_none_idle, started_run
from mimo_train.launch.rank_monitor import watched
from mimo_train.layout.run import Run
from mimo_train.models.heads import ModelHook
from mimo_train.optim.module_optimizer import ModuleOptimizer
from mimo_train.optim.schedules import ModuleSchedulers
from mimo_train.training import setup as native
from mimo_train.training.callbacks import Callback, Callbacks, load_callbacks
from mimo_train.training.pretrain import require_one_forward_step
from mimo_train.training.shutdown import ExitVotes
from mimo_train.training.step.batches import StepIterator


@dataclass(frozen=True)
class SetupOutput:
    """The result of `setup`, for `train` and the documented functions."""

    state: SessionState
    model: list[MegatronModule]
    optimizer: ModuleOptimizer
    scheduler: ModuleSchedulers
    train_data_iterator: StepIterator
    valid_data_iterator: HeldOut | None
    checkpointing_context: dict[str, Any] = field(default_factory=dict)
    resources: ExitStack = field(default_factory=ExitStack, repr=False)
    """The watch of this rank, and the signal handlers that `setup` installed."""

    def close(self) -> None:
        """End threads, profilers and writers, and the watch of this rank; restore the signal handlers."""
        with self.resources:
            self.state.session.close()


def setup(
    config: ConfigContainer | Run,
    *,
    exit_signal: ExitSignal | None = None,
    callbacks: Sequence[Callback] = (),
    pre_wrap_hook: ModelHook | None = None,
    store: dist.Store | None = None,
) -> SetupOutput:
    """Build a run, or resume it from its newest checkpoint. Collective over all ranks. It is recorded and watched as a
    run of `pretrain`, but time between calls of this package is never a hang.

    Args:
        exit_signal: an `ExitSignal` that already listens; it listens on after `close`. By default signals are recorded
            from here to `close`.
        callbacks: called by the loop and by the documented functions, after those of `train.callbacks`.
        pre_wrap_hook: changes the model chunks before they are wrapped, see `mimo_train.models.heads`.
        store: for the rendezvous, instead of the address in the environment.

    Raises:
        UserError: this process has a run that has not been closed.
        ConfigError: the config has faults or names a forward step, a callback cannot be loaded, or a process has no
            module. Also everything that `pretrain` raises.
    """
    if RECORDER.in_use:
        raise UserError(
            "setup: this process has a run already, and one alone can be recorded and watched: call close() of what "
            "setup returned for it, then set up the next"
        )
    run, start_time = config if isinstance(config, Run) else started_run(config), time.time()
    require_none_idle(run)
    require_one_forward_step(run.cfg)
    listeners = Callbacks([*load_callbacks(run.cfg.train.callbacks), *callbacks])
    with ExitStack() as stack:
        signals = stack.enter_context(ExitSignal()) if exit_signal is None else exit_signal.listen()
        votes = ExitVotes(signals, run.cfg.train.exit_duration_minutes, start_time, ends_waits=True)
        stack.enter_context(watched(run))
        session = native.setup(run, votes, start_time=start_time, store=store, pre_wrap_hook=pre_wrap_hook)
        RECORDER.to(CALLER)
        resources = stack.pop_all()
    return SetupOutput(
        state=SessionState.of(session, listeners),
        model=session.model,
        optimizer=session.optimizer,
        scheduler=session.schedulers,
        train_data_iterator=session.data,
        valid_data_iterator=session.held_out,
        resources=resources,
    )
