"""Entry points: `pretrain` and `finetune` drive the same loop; `SteppedRun` lets the caller make each step."""

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule

from mimo_train.checkpoint.folder_changes import full_disk
from mimo_train.config.errors import ConfigError, Fault
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.user_code import FORWARD_STEP
from mimo_train.flight.recorder import RECORDER
from mimo_train.launch.exit_signal import ExitSignal
from mimo_train.launch.processes import is_idle, numbered, require_none_idle, say_idle, started_run
from mimo_train.launch.rank_monitor import Driven, note_error, watched
from mimo_train.launch.restarts import stopped_code
from mimo_train.layout.run import Run, require_config
from mimo_train.logging.rank_log import show
from mimo_train.models.heads import ModelHook
from mimo_train.training.callbacks import Callback, Callbacks, load_callbacks
from mimo_train.training.data_setup import CountingStopped
from mimo_train.training.inprocess import with_restarts
from mimo_train.training.loop import train
from mimo_train.training.setup import Session, setup
from mimo_train.training.shutdown import ExitVotes
from mimo_train.training.step import gpt_step, mimo_step
from mimo_train.training.step.forward_step import ForwardStepCallable, load_forward_step, prepare_forward_step_func
from mimo_train.training.step.state import GlobalState, StepResult
from mimo_train.training.train_step import train_step


def default_forward_step(cfg: ConfigContainer) -> ForwardStepCallable:
    """Return the default forward step: that of `train.forward_step`, or the one for several modules or for the language
    model alone. Raises ConfigError if `train.forward_step` cannot be used."""
    if cfg.train.forward_step:
        return load_forward_step(cfg.train.forward_step)
    return mimo_step.forward_step if cfg.encoders else gpt_step.forward_step


def require_one_forward_step(cfg: ConfigContainer) -> None:
    """Raise ConfigError if the config names a forward step, because the caller passes one."""
    if cfg.train.forward_step:
        text = f"is {cfg.train.forward_step}, and this program passes a forward step too. Set train.forward_step=''"
        raise ConfigError([Fault(FORWARD_STEP, text)])


def pretrain(
    config: ConfigContainer | Run,
    forward_step_func: ForwardStepCallable | None = None,
    *,
    exit_signal: ExitSignal | None = None,
    callbacks: Sequence[Callback] = (),
    pre_wrap_hook: ModelHook | None = None,
) -> int:
    """Train, evaluate and save according to the config; resume if `run.dir` holds a checkpoint.

    Args:
        config: the config, or a `Run` that `started_run` has resolved.
        forward_step_func: see `forward_step.ACCEPTED_FORMS`; default: `default_forward_step`.
        exit_signal: an `ExitSignal` that already listens, so that no early signal is lost; it listens on after the run.
        callbacks: called after those of `train.callbacks`.
        pre_wrap_hook: changes the model chunks before they are wrapped, see `mimo_train.models.heads`.

    Returns:
        The exit code; 0 at once on a process without a module (`placement.allow_idle`).

    Raises:
        UserError: `config` is not a `ConfigContainer`.
        ConfigError: values, modules, layout or batch are impossible, or a callback or forward step cannot be loaded.
        UserError, DataError: `run.dir`, data, tokenizer or checkpoint cannot be used.
    """
    run = config if isinstance(config, Run) else started_run(config)
    if is_idle(run.layout):
        say_idle()
        return 0
    listeners = Callbacks([*load_callbacks(run.cfg.train.callbacks), *callbacks])
    if forward_step_func is not None:
        require_one_forward_step(run.cfg)
    step_func, start_time = forward_step_func or default_forward_step(run.cfg), time.time()
    # The caller's exit signal listens on: a signal after the run is as harmless as one in it.
    listening = nullcontext(exit_signal.listen()) if exit_signal is not None else ExitSignal()
    with listening as signal, numbered(run.layout), watched(run):
        life = partial(one_life, run, step_func, listeners, signal, start_time, pre_wrap_hook)
        return with_restarts(life, run.cfg.run)()


def one_life(
    run: Run,
    forward_step_func: ForwardStepCallable,
    callbacks: Callbacks,
    exit_signal: ExitSignal,
    start_time: float,
    pre_wrap_hook: ModelHook | None = None,
    store: dist.Store | None = None,
) -> int:
    """Set up, train and close once, and return the exit code; an in-process restart calls it again.

    Args:
        start_time: start of this job, in seconds since the epoch, for `train.exit_duration_minutes`. The log counts
            from this call.
        store: for the rendezvous, instead of the address in the environment.
    """
    votes = ExitVotes(exit_signal, run.cfg.train.exit_duration_minutes, start_time, ends_waits=True)
    session: Session | None = None
    try:
        session = setup(run, votes, start_time=time.time(), store=store, pre_wrap_hook=pre_wrap_hook)
        return train(session, forward_step_func, callbacks)
    except CountingStopped as stopped:
        if os.environ.get("RANK", "0") == "0":
            show(str(stopped))
        return stopped_code()
    except BaseException as error:
        state = session.state if session else GlobalState(run, start_time=start_time)
        callbacks.fire("on_failure", state, error)
        full = full_disk(error, run.dir)
        note_error(full or error)  # before close(), which a hanging file system may block
        if full is not None:
            raise full from error
        raise
    finally:
        if session is not None:
            session.close()


def finetune(
    config: ConfigContainer,
    forward_step_func: ForwardStepCallable | None = None,
    *,
    exit_signal: ExitSignal | None = None,
    callbacks: Sequence[Callback] = (),
    pre_wrap_hook: ModelHook | None = None,
) -> int:
    """Train from the weights of another run: `pretrain` for a config with `checkpoint.weights`.

    This is a new run with its own data, optimizer and schedule; restarted, it resumes from its own checkpoints. Raises
    ConfigError if `checkpoint.weights` is empty, and all that `pretrain` raises.
    """
    require_config(config)
    if not config.checkpoint.weights:
        raise ConfigError([Fault("checkpoint.weights", "is empty: finetune starts from the weights of a checkpoint")])
    return pretrain(
        config, forward_step_func, exit_signal=exit_signal, callbacks=callbacks, pre_wrap_hook=pre_wrap_hook
    )


class SteppedRun:
    """A run that is set up, or resumed from its newest checkpoint, and makes one step per call.

    It has no log, no evaluation and no checkpoints, only counts non-finite gradients, and ignores `train.skip_iters`.
    Collective: all ranks make the same calls in the same order.
    """

    def __init__(
        self,
        config: ConfigContainer,
        forward_step_func: ForwardStepCallable | None = None,
        pre_wrap_hook: ModelHook | None = None,
    ):
        """Set up the run; the arguments are those of `pretrain`."""
        votes = ExitVotes(ExitSignal(), 0, 0)
        run = started_run(config)
        if forward_step_func is not None:
            require_one_forward_step(config)
        require_none_idle(run)
        self._watch = Driven()
        with self._watch.starts(run):
            self.session = setup(run, votes, start_time=time.time(), pre_wrap_hook=pre_wrap_hook)
        self.step_func = prepare_forward_step_func(
            forward_step_func or default_forward_step(config), self.session.state
        )

    @property
    def model(self) -> list[MegatronModule]:
        """The model chunks of this rank."""
        return self.session.model

    def step(self) -> StepResult:
        """Make the next step."""
        session, progress = self.session, self.session.state.train_state
        with Driven.calls():
            RECORDER.begin_step(progress.step + 1)
            session.freeze_stages.apply(progress.step)
            with session.parts.stopwatch("step"):
                session.data.advance()
                result = train_step(session, self.step_func)
        progress.count(session.data.current.size, session.data.current.plan.tokens, result)
        session.bad_samples.note(session.data)
        session.empty_steps.note(result.tokens)
        return result

    def close(self) -> None:
        """End threads and writers; nothing is saved."""
        try:
            self.session.close()
        finally:
            self._watch.close()
