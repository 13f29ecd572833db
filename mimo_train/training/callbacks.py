"""User code in a run: classes whose methods are called at fixed moments, on every rank unless noted otherwise.

    class Stop(Callback):
        def on_step_end(self, state, result):
            ...

`train.callbacks=[package.module:Stop]` instantiates the class without arguments; `pretrain(..., callbacks=[Stop()])`
takes objects. An error that a callback raises ends the run, on all ranks.
"""

import gc
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megatron.core.transformer.module import MegatronModule

from mimo_train.config.errors import ConfigError, Fault, UserError
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.user_code import CALLBACKS, load_code, unusable_code
from mimo_train.debug.profiling import StepProfiler
from mimo_train.debug.rerun import require_equal_replicas
from mimo_train.training.shutdown import is_due
from mimo_train.training.step.state import GlobalState, StepResult


class Callback:
    """Base of all callbacks: override what you need. `state.train_state.step` counts the steps.

    Raises:
        TypeError: a subclass has an `on_...` method that is not an event; at the class definition.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if unknown := sorted(name for name in vars(cls) if name.startswith("on_") and not hasattr(Callback, name)):
            raise TypeError(
                f"{cls.__qualname__}.{unknown[0]} is not a callback event: the events are {', '.join(EVENTS)}"
            )

    def on_train_start(self, state: GlobalState, model: list[MegatronModule]) -> None:
        """The run is built, or resumed from a checkpoint; no step has run yet.

        `model`: the model chunks of this rank, wrapped for data parallelism. `mimo_train.models.parameters.modules_of`
        names the modules in them.
        """

    def on_step_start(self, state: GlobalState) -> None:
        """A step begins; `train_state.step` steps are done."""

    def on_step_end(self, state: GlobalState, result: StepResult) -> None:
        """A step has ended; `train_state.step` includes it."""

    def on_log(self, state: GlobalState, values: dict[str, float]) -> None:
        """`values` have been written; at logging steps, on the logging rank only."""

    def on_evaluation(self, state: GlobalState, values: dict[str, float]) -> None:
        """An evaluation has ended. `values` (`eval/...`) is filled on ranks of the language model's last stage, among
        them the logging rank, and empty elsewhere."""

    def on_checkpoint(self, state: GlobalState, folder: Path) -> None:
        """A checkpoint is complete in `folder`; with `checkpoint.asynchronous`, some steps later."""

    def on_train_end(self, state: GlobalState, exit_code: int) -> None:
        """The loop has ended, after its last step or on request; not after a failure."""

    def on_failure(self, state: GlobalState, error: BaseException) -> None:
        """This rank has failed with `error`. Other ranks may not have noticed: make no collective call here."""


EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))
"""Every event, in the order of a run."""


class Callbacks:
    """Calls the user's callbacks and those of every run."""

    def __init__(self, callbacks: Iterable[Callback] = ()):
        """Add `callbacks`; see `add`."""
        self._callbacks: list[Callback] = []
        self.add(*callbacks)

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._callbacks)

    def add(self, *callbacks: Callback) -> None:
        """Append callbacks; raises TypeError for other objects."""
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise TypeError(f"callbacks: {callback!r} is not an instance of {__name__}.Callback")
            self._callbacks.append(callback)

    def fire(self, event: str, state: GlobalState, *args: Any) -> None:
        """Call the method `event` of every callback. An exception propagates, Python's own exit as an error.
        `on_failure` calls every callback and adds exceptions as notes to the run's error."""
        for callback in self._callbacks:
            name = f"{type(callback).__qualname__}.{event}"
            try:
                getattr(callback, event)(state, *args)
            except (Exception, SystemExit) as error:
                if event == "on_failure":
                    args[0].add_note(f"{name} failed too: {type(error).__name__}: {error}")
                elif isinstance(error, SystemExit):
                    raise UserError(
                        f"the callback {name} called sys.exit({error.code!r}), with which no rank would save: raise an "
                        "error to end the run as failed, or os.kill(os.getpid(), signal.SIGTERM) to save and end it"
                    ) from error
                else:
                    raise


def load_callbacks(entries: Iterable[str]) -> list[Callback]:
    """Instantiate the classes of `train.callbacks`; modules may be in the working directory.

    Raises:
        ConfigError: a module cannot be imported or has no such class, or the class is not a callback, takes arguments
            or fails; names every such entry.
    """
    loaded: list[Callback] = []
    faults: list[Fault] = []
    for entry in entries:
        try:
            listener = load_code(CALLBACKS, entry)
            if not (isinstance(listener, type) and issubclass(listener, Callback)):
                raise TypeError(f"{entry.partition(':')[2]} is not a subclass of {__name__}.Callback")
            loaded.append(listener())
        except ConfigError as error:
            faults += error.faults
        except (Exception, SystemExit) as error:  # a user's code may raise anything
            faults.append(unusable_code(CALLBACKS, entry, error))
    if faults:
        raise ConfigError(faults)
    return loaded


class Profiling(Callback):
    """Starts and stops the profilers of `profiling`."""

    def __init__(self, profiler: StepProfiler):
        self._profiler = profiler

    def on_step_start(self, state: GlobalState) -> None:
        self._profiler.before_step(state.train_state.step + 1)

    def on_step_end(self, state: GlobalState, result: StepResult) -> None:
        self._profiler.after_step(state.train_state.step)


class StepChecks(Callback):
    """Work between steps, before a save: the comparison of data-parallel replicas, and garbage collection.

    With `train.manual_gc_interval` above 0, all ranks collect garbage after the same step, so that no rank waits for
    another's collector in a step. Python's own collector is off until the loop ends. Objects alive at the start are
    frozen, because they live for the full run.
    """

    def __init__(self, model: list[MegatronModule], loop: ExitStack):
        """Take a stack that turns Python's collector on again when the loop ends."""
        self._model, self._loop = model, loop

    def on_train_start(self, state: GlobalState, model: list[MegatronModule]) -> None:
        if state.cfg.train.manual_gc_interval < 1:
            return
        if gc.isenabled():
            self._loop.callback(gc.enable)
        self._loop.callback(gc.unfreeze)
        gc.disable()
        gc.collect()
        gc.freeze()

    def on_step_end(self, state: GlobalState, result: StepResult) -> None:
        check_replicas_and_collect_garbage(state.cfg, self._model, state.train_state.step)


def check_replicas_and_collect_garbage(cfg: ConfigContainer, model: list[MegatronModule], step: int) -> None:
    """Compare data-parallel replicas before a save, with `train.rerun`, and collect garbage if due. Raises RuntimeError
    if replicas differ."""
    if cfg.train.rerun != "disabled" and is_due(cfg.checkpoint.save_interval, step):
        require_equal_replicas(model, step)
    if is_due(cfg.train.manual_gc_interval, step):
        gc.collect()
