"""Entry points with the names of Megatron-Bridge."""

from typing import Any

import torch.distributed as dist

from mimo_train.launch.exit_signal import ExitSignal
from mimo_train.launch.processes import numbered
from mimo_train.launch.rank_monitor import watched
from mimo_train.training.callbacks import Callbacks, load_callbacks
from mimo_train.training.pretrain import finetune, one_life, pretrain, require_one_forward_step
from mimo_train.training.step.forward_step import ForwardStepCallable
from mimo_train.training.step.state import GlobalState

__all__ = ["_pretrain", "finetune", "pretrain"]


def _pretrain(
    state: GlobalState,
    forward_step_func: ForwardStepCallable,
    store: dist.Store | None = None,
    inprocess_call_wrapper: Any = None,
) -> int:
    """Set up, train and close once, inside the current processes; returns the exit code.

    Args:
        state: created from a run alone, `GlobalState(resolve(config))`; each call sets up its own state.
        store: for the rendezvous, instead of the address in the environment.
        inprocess_call_wrapper: unused: a restarted run resumes from its newest checkpoint.
    """
    require_one_forward_step(state.cfg)
    callbacks = Callbacks(load_callbacks(state.cfg.train.callbacks))
    with ExitSignal() as signal, numbered(state.layout), watched(state.run):
        return one_life(state.run, forward_step_func, callbacks, signal, state.start_time, store=store)
