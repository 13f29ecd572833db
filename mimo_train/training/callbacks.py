"""User code in a run: classes whose methods are called at fixed moments, on every rank unless noted otherwise.

    class Stop(Callback):
        def on_step_end(self, state, result):
            ...

`train.callbacks=[package.module:Stop]` instantiates the class without arguments; `pretrain(..., callbacks=[Stop()])`
takes objects. An error that a callback raises ends the run, on all ranks.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron.core.transformer.module import MegatronModule

from mimo_train.config.errors import ConfigError, Fault, UserError
from mimo_train.config.user_code import CALLBACKS, load_code, unusable_code
from mimo_train.training.step.state import GlobalState, StepResult


class Callback:
    """Base of all callbacks: override what you need. `state.train_state.step` counts the steps.

    Raises:
        TypeError: a subclass has an `on_...` method that is not an event; at the class definition.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        _require_events(cls.__qualname__, vars(cls))

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
    """Calls the user's callbacks and those of every run; an event without listeners costs one look-up."""

    def __init__(self, callbacks: Iterable[Callback] = ()):
        """Add `callbacks`; see `add`."""
        self._callbacks: list[Callback] = []
        self._listeners: dict[str, list[Callable]] = {event: [] for event in EVENTS}
        self.add(*callbacks)

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._callbacks)

    def add(self, *callbacks: Callback) -> None:
        """Append callbacks; raises TypeError for other objects, or an `on_...` function that is not an event."""
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise TypeError(f"callbacks: {callback!r} is not an instance of {__name__}.Callback")
            names = (name for name, value in vars(callback).items() if callable(value))
            _require_events(type(callback).__qualname__, names)
        for callback in callbacks:
            self._callbacks.append(callback)
            for event in EVENTS:
                if _overrides(callback, event):
                    self._listeners[event].append(getattr(callback, event))

    def fire(self, event: str, state: GlobalState, *args: Any) -> None:
        """Call every listener of `event`. An exception propagates, Python's own exit as an error. `on_failure` calls
        every listener and adds exceptions as notes to the run's error."""
        for listener in self._listeners[event]:
            name = getattr(listener, "__qualname__", repr(listener))
            try:
                listener(state, *args)
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
            loaded.append(_load(entry))
        except ConfigError as error:
            faults += error.faults
        except (Exception, SystemExit) as error:  # a user's code may raise anything
            faults.append(unusable_code(CALLBACKS, entry, error))
    if faults:
        raise ConfigError(faults)
    return loaded


def _load(entry: str) -> Callback:
    listener = load_code(CALLBACKS, entry)
    if not (isinstance(listener, type) and issubclass(listener, Callback)):
        raise TypeError(f"{entry.partition(':')[2]} is not a subclass of {__name__}.Callback")
    return listener()


def _require_events(owner: str, names: Iterable[str]) -> None:
    unknown = sorted(name for name in names if name.startswith("on_") and name not in EVENTS)
    if unknown:
        raise TypeError(f"{owner}.{unknown[0]} is not a callback event: the events are {', '.join(EVENTS)}")


def _overrides(callback: Callback, event: str) -> bool:
    listener = getattr(callback, event)
    return getattr(listener, "__func__", listener) is not getattr(Callback, event)
