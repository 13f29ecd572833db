"""Entry points: `pretrain` and `finetune` drive the same loop."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from mimo_train.check.faults import config_faults
from mimo_train.config.schema import ConfigContainer, ConfigError, Fault
from mimo_train.launch.processes import is_idle, numbered, say_idle, start_faults
from mimo_train.model.heads import ModelHook
from mimo_train.plan.layout import plan
from mimo_train.plan.placement import note_nodes
from mimo_train.step import gpt_step, mimo_step
from mimo_train.step.callbacks import Callback, Callbacks, load_callbacks
from mimo_train.step.exit import ExitConditions, ExitSignal
from mimo_train.step.forward_step import ForwardStepCallable, needs_global_state_injection
from mimo_train.step.state import GlobalState
from mimo_train.training.inprocess import maybe_wrap_for_inprocess_restart
from mimo_train.training.loop import train
from mimo_train.training.setup import SetupOutput, setup


def default_forward_step(cfg: ConfigContainer) -> ForwardStepCallable:
    """`mimo_step.forward_step` for several modules, `gpt_step.forward_step` for a plain GPT."""
    return mimo_step.forward_step if cfg.encoders else gpt_step.forward_step


def pretrain(
    config: ConfigContainer,
    forward_step_func: ForwardStepCallable | None = None,
    exit_signal: ExitSignal | None = None,
    callbacks: Sequence[Callback] = (),
    pre_wrap_hook: ModelHook | None = None,
) -> int:
    """Train, evaluate and save as the config says; continue if `run.dir` holds a checkpoint.

    Args:
        forward_step_func: see `forward_step.ACCEPTED_FORMS`; default: `default_forward_step`.
        exit_signal: notes signals already, for a program that wants them noted from its first moment.
        callbacks: called after those of `train.callbacks`.
        pre_wrap_hook: changes the model chunks before they are wrapped, see `mimo_train.model.heads`.

    Returns:
        The exit code; 0 at once on a process without a module (`placement.allow_idle`).

    Raises:
        ConfigError: values, modules, layout or batch are impossible, or a callback cannot be loaded.
        ValueError: data, tokenizer or checkpoint cannot be used.
        TypeError: the forward step has none of the accepted forms.
    """
    note_nodes(config)
    faults = config_faults(config)
    if faults:
        raise ConfigError(faults)
    layout = plan(config)
    faults = start_faults(config, layout)
    if faults:
        raise ConfigError(faults)
    if is_idle(layout):
        say_idle()
        return 0
    forward_step_func = forward_step_func or default_forward_step(config)
    needs_global_state_injection(forward_step_func)
    with exit_signal or ExitSignal() as exit_signal, numbered(layout):
        listeners = Callbacks([*load_callbacks(config.train.callbacks), *callbacks])
        state = GlobalState(config, callbacks=listeners, exit_signal=exit_signal, pre_wrap_hook=pre_wrap_hook)
        return maybe_wrap_for_inprocess_restart(_pretrain, config)(state, forward_step_func)


def _pretrain(
    state: GlobalState,
    forward_step_func: ForwardStepCallable,
    store: dist.Store | None = None,
    inprocess_call_wrapper: Any = None,
) -> int:
    """One life of a run inside its processes: set up, train, close.

    Args:
        state: made from a valid config.
        store: where the processes meet, instead of the address in the environment; given at an in-process restart.
        inprocess_call_wrapper: nvidia-resiliency-ext's `CallWrapper`; its iteration is above 0 when the run starts
            again, from its newest checkpoint. Each life has a fresh state, and `state` stays as it is.

    Returns:
        The exit code.
    """
    if inprocess_call_wrapper is not None:
        # The caller holds the given one for all lives: the model of an ended life would stay in memory with it.
        state = GlobalState(
            state.cfg,
            callbacks=state.callbacks,
            exit_signal=state.exit_signal,
            pre_wrap_hook=state.pre_wrap_hook,
            start_time=state.start_time,
        )
    run = None
    try:
        run = setup(state, store)
        state.pipeline.votes = ExitConditions(state, state.exit_signal).votes
        return train(
            forward_step_func,
            run.model,
            run.optimizer,
            run.scheduler,
            run.train_data_iterator,
            run.held_out,
            state,
            run.checkpointing_context,
        )
    except BaseException as error:
        state.callbacks.fire("on_failure", state, error)
        raise
    finally:
        close(state, run)


def finetune(
    config: ConfigContainer,
    forward_step_func: ForwardStepCallable | None = None,
    exit_signal: ExitSignal | None = None,
    callbacks: Sequence[Callback] = (),
    pre_wrap_hook: ModelHook | None = None,
) -> int:
    """Train from the weights of another run: `pretrain` for a config with `checkpoint.weights`.

    A run of its own, with its own data, optimizer and schedule; started again, it continues from its own checkpoints.

    Raises:
        ConfigError: `checkpoint.weights` is empty; and all that `pretrain` raises.
    """
    if not config.checkpoint.weights:
        raise ConfigError([Fault("checkpoint.weights", "is empty: finetune starts from the weights of a checkpoint")])
    return pretrain(config, forward_step_func, exit_signal, callbacks, pre_wrap_hook)


def close(state: GlobalState, run: SetupOutput | None) -> None:
    """End threads, profilers and writers, also after a failure."""
    if run is not None:
        run.train_data_iterator.close()
    if state.profiler is not None:
        state.profiler.close()
    if state.metrics is not None:
        state.console.close()
        state.metrics.close()
