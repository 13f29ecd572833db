"""What users add to a run: classes whose methods are called at fixed moments, on every rank unless said otherwise.

    class Stop(Callback):
        def on_step_end(self, state, result):
            ...

`train.callbacks=[package.module:Stop]` makes one without arguments; `pretrain(..., callbacks=[Stop()])` takes objects.
An error that a callback raises ends the run, on all ranks.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megatron.core.transformer.module import MegatronModule

from mimo_train.config.fault import ConfigError, Fault
from mimo_train.step.result import StepResult
from mimo_train.step.state import GlobalState


class Callback:
    """Base of all callbacks: override what you need. Steps are counted in `state.train_state.step`.

    Raises:
        TypeError: a subclass has an `on_...` method that is no event; when the class is made.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        unknown = sorted(name for name in vars(cls) if name.startswith("on_") and name not in EVENTS)
        if unknown:
            raise TypeError(f"{cls.__qualname__}.{unknown[0]} is no event of a callback: there are {', '.join(EVENTS)}")

    def on_train_start(self, state: GlobalState, model: list[MegatronModule]) -> None:
        """The run is built, or continued from a checkpoint; no step has been made yet.

        `model`: the model chunks of this rank, wrapped for data parallelism; `mimo_train.model.names.modules_of` names
        the modules in them.
        """

    def on_step_start(self, state: GlobalState) -> None:
        """A step begins; `train_state.step` steps are done."""

    def on_step_end(self, state: GlobalState, result: StepResult) -> None:
        """A step has ended and is counted."""

    def on_log(self, state: GlobalState, values: dict[str, float]) -> None:
        """`values` of a step have been written; at logging steps, on the logging rank only."""

    def on_evaluation(self, state: GlobalState, values: dict[str, float]) -> None:
        """An evaluation has ended. `values` (`eval/...`) are there on ranks of the language model's last stage, the
        logging rank among them; elsewhere the dict is empty."""

    def on_checkpoint(self, state: GlobalState, folder: Path) -> None:
        """A checkpoint is complete in `folder`."""

    def on_train_end(self, state: GlobalState, exit_code: int) -> None:
        """The loop has ended, after its last step or because an exit was asked for; not after a failure."""

    def on_failure(self, state: GlobalState, error: BaseException) -> None:
        """This rank fails with `error` and ends. Other ranks may not know it yet: call nothing collective here."""


EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))
"""Every event, in the order of a run."""


class Callbacks:
    """Calls callbacks in the order they were given. An event that none overrides costs a look-up."""

    def __init__(self, callbacks: Iterable[Callback] = ()):
        """
        Raises:
            TypeError: something in `callbacks` is no `Callback`.
        """
        callbacks = list(callbacks)
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise TypeError(f"callbacks: {callback!r} is no object of a subclass of {__name__}.Callback")
        self._listeners: dict[str, list[Callable]] = {
            event: [getattr(callback, event) for callback in callbacks if _overrides(type(callback), event)]
            for event in EVENTS
        }

    def fire(self, event: str, state: GlobalState, *args: Any) -> None:
        """Call every listener of `event`. What a listener raises goes on to the caller; but while a run fails, every
        listener is called, and what one raises is noted at the error of the run."""
        for listener in self._listeners[event]:
            if event != "on_failure":
                listener(state, *args)
                continue
            try:
                listener(state, *args)
            except Exception as second:
                args[0].add_note(f"{listener.__qualname__} failed too: {type(second).__name__}: {second}")


def load_callbacks(entries: Iterable[str]) -> list[Callback]:
    """Objects of the classes that `train.callbacks` names; modules are found from the working directory too.

    Raises:
        ConfigError: a module cannot be imported, has no such class, or the class is no callback or takes arguments;
            every such entry.
    """
    folder = os.getcwd()
    # Last, so that it hides nothing; the scripts and the `mimo-train` command leave it off the path.
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)
    loaded, faults = [], []
    for entry in entries:
        try:
            loaded.append(_load(entry))
        except (ImportError, AttributeError, TypeError) as error:
            faults.append(Fault("train.callbacks", f"{entry!r} cannot be used: {error}"))
    if faults:
        raise ConfigError(faults)
    return loaded


def _load(entry: str) -> Callback:
    module, _, name = entry.partition(":")
    found = getattr(importlib.import_module(module), name)
    if not (isinstance(found, type) and issubclass(found, Callback)):
        raise TypeError(f"{name} is no subclass of {__name__}.Callback")
    return found()


def _overrides(kind: type, event: str) -> bool:
    return getattr(kind, event) is not getattr(Callback, event)
