"""Entry points: `pretrain` and `finetune` drive the same loop, with in-process restarts if the config asks for them."""

import gc
import os
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from mimo_train.checkpoint.save import full_disk
from mimo_train.config.errors import ConfigError, Fault
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_run import RunConfig
from mimo_train.config.user_code import FORWARD_STEP
from mimo_train.launch.exit_signal import ExitSignal
from mimo_train.launch.processes import is_idle, numbered, say_idle, started_run
from mimo_train.launch.rank_monitor import note_error, watched
from mimo_train.launch.restarts import stopped_code
from mimo_train.layout.run import Run, require_config
from mimo_train.logging.rank_log import show
from mimo_train.models.heads import ModelHook
from mimo_train.parallel import device
from mimo_train.training.callbacks import Callback, Callbacks, load_callbacks
from mimo_train.training.data_setup import PreparationStopped
from mimo_train.training.loop import train
from mimo_train.training.setup import Session, setup
from mimo_train.training.shutdown import ExitVotes
from mimo_train.training.step import forward_step
from mimo_train.training.step.forward_step import ForwardStepCallable, load_forward_step
from mimo_train.training.step.state import GlobalState


def default_forward_step(cfg: ConfigContainer) -> ForwardStepCallable:
    """Return the default forward step: that of `train.forward_step`, or the one for several modules or for the language
    model alone. Raises ConfigError if `train.forward_step` cannot be used."""
    if cfg.train.forward_step:
        return load_forward_step(cfg.train.forward_step)
    return forward_step.mimo_forward_step if cfg.encoders else forward_step.gpt_forward_step


def require_one_forward_step(cfg: ConfigContainer) -> None:
    """Raise ConfigError if the config names a forward step or another task than sft, because the caller passes a
    forward step."""
    if cfg.train.task != "sft":
        text = f"is {cfg.train.task}, and this program passes a forward step with its own loss. Set train.task=sft"
        raise ConfigError([Fault("train.task", text)])
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
    except PreparationStopped as stopped:
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


def with_restarts(life: Callable[[dist.Store | None], int], run: RunConfig) -> Callable[[], int]:
    """Wrap `life`, which runs from the newest checkpoint to the end, so that it restarts after failures.

    `life` receives the store for the rendezvous; None means the address in the environment. It restarts at most
    `run.inprocess_restarts` times, if it raises on any rank or a rank's interpreter hangs for `run.timeout_minutes`. A
    process that has died cannot restart from inside: then all processes end.
    """
    restarts = run.inprocess_restarts
    if restarts == 0:
        return partial(life, None)
    from nvidia_resiliency_ext import inprocess

    class Finalize(inprocess.finalize.Finalize):
        """Clears the state that the failed attempt left in this process; its process groups are already destroyed."""

        def __call__(self, frozen_state: inprocess.state.FrozenState) -> inprocess.state.FrozenState:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_global_memory_buffer()
            for instance in gc.get_objects():
                # Not isinstance, which reads `__class__`: some libraries' objects import modules then.
                if issubclass(type(instance), DistributedDataParallel):
                    # The garbage collector does not see the graph nodes, whose hooks hold the model.
                    for node in instance.grad_accs:
                        node.register_hook(print).hooks_dict_ref().clear()
            return frozen_state

    last_error: list[Exception] = []

    def attempt(call_wrapper: inprocess.CallWrapper = None) -> int:
        # The wrapper has just released the last attempt's error, and the objects in its frames.
        gc.collect()
        device.release_cached_memory()
        # The wrapper's own connection is busy waiting for the status of other ranks.
        rendezvous = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        store = dist.PrefixStore(f"mimo_train/life_{call_wrapper.iteration}", rendezvous)
        try:
            return life(store)
        except Exception as error:
            if call_wrapper.iteration == restarts:
                last_error.append(error)
            else:
                traceback.print_exc()
            raise

    def run_attempts() -> int:
        _be_reachable()
        timeout = timedelta(minutes=run.timeout_minutes)
        wrapper = inprocess.Wrapper(
            initialize=inprocess.initialize.RetryController(
                max_iterations=restarts + 1, min_world_size=int(os.environ["WORLD_SIZE"])
            ),
            finalize=Finalize(),
            soft_timeout=timeout,
            hard_timeout=1.5 * timeout,
            barrier_timeout=2 * timeout,
            completion_timeout=2 * timeout,
        )
        try:
            return wrapper(attempt)()
        except inprocess.exception.RestartAbort:
            if last_error:
                raise last_error[0] from None
            raise

    return run_attempts


def _be_reachable() -> None:
    """Set the rendezvous variables for a single process that torchrun did not start."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = str(listener.getsockname()[1])
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
        os.environ.setdefault(name, value)
