"""The contract of a forward step: the accepted signatures, and how the state is passed to it."""

import inspect
import typing
from collections.abc import Callable
from functools import partial
from typing import Any

from mimo_train.config.fault import ConfigError
from mimo_train.config.own_code import FORWARD_STEP, load_code, unusable_code
from mimo_train.step.losses import StepLosses
from mimo_train.step.state import GlobalState

ForwardStepCallable = Callable[..., tuple[Any, Callable | None]]
"""A function or functor, see `ACCEPTED_FORMS`."""

ACCEPTED_FORMS = (
    "(data_iterator, model)",
    "(data_iterator, model, return_schedule_plan=False)",
    "(state: GlobalState, data_iterator, model)",
    "(state: GlobalState, data_iterator, model, return_schedule_plan=False)",
)
"""Signatures of a forward step. It returns (output, loss function), or (output, None) before the last stage."""

_STATE_NAMES = ("state", "global_state")


def load_forward_step(entry: str) -> ForwardStepCallable:
    """Return the forward step of `train.forward_step`: the function of that name, or an instance of the class.

    Raises:
        ConfigError: it cannot be imported or instantiated, or cannot be called.
    """
    forward_step = load_code(FORWARD_STEP, entry)
    try:
        if isinstance(forward_step, type):
            forward_step = forward_step()
        if not callable(forward_step):
            raise TypeError(f"expected a function or a class with __call__, got {type(forward_step).__name__}")
    except (Exception, SystemExit) as error:  # whatever a user's code raises
        raise ConfigError([unusable_code(FORWARD_STEP, entry, error)]) from error
    return forward_step


def prepare_forward_step_func(forward_step_func: ForwardStepCallable, state: GlobalState) -> ForwardStepCallable:
    """The forward step as the schedule calls it, with the state bound if its signature has one.

    Called once per loop. The bound state is the object itself, so later changes are visible. A functor keeps its own
    attributes.
    """
    return maybe_inject_state(forward_step_func, state, needs_global_state_injection(forward_step_func))


def needs_global_state_injection(forward_step_func: ForwardStepCallable) -> bool:
    """Whether the forward step takes the state: by a `GlobalState` annotation, or by its first parameter's name. Any
    other signature is called without it."""
    parameters, hints = _parameters(forward_step_func), _hints(forward_step_func)
    if any(_is_state(hints.get(parameter.name, parameter.annotation)) for parameter in parameters):
        return True
    return bool(parameters) and parameters[0].name in _STATE_NAMES


def maybe_inject_state(
    forward_step_func: ForwardStepCallable, state: GlobalState, needs_injection: bool | None = None
) -> ForwardStepCallable:
    """Bind `state` as the first argument if the forward step takes it.

    Args:
        needs_injection: result of `needs_global_state_injection`, if it is known already.
    """
    if needs_injection is None:
        needs_injection = needs_global_state_injection(forward_step_func)
    return partial(forward_step_func, state) if needs_injection else forward_step_func


def record_losses(forward_step_func: ForwardStepCallable, losses: StepLosses) -> ForwardStepCallable:
    """The forward step, with its loss functions normalised and their reports kept in `losses`.

    Raises (when called):
        TypeError: the forward step returned something other than (output, loss function or None).
    """

    def step(data_iterator: Any, model: Any, **options: Any) -> tuple[Any, Callable | None]:
        result = forward_step_func(data_iterator, model, **options)
        good = isinstance(result, tuple) and len(result) == 2 and (result[1] is None or callable(result[1]))
        if not good:
            raise TypeError(
                f"forward step {_name(forward_step_func)} returned {type(result).__name__}: it must return (output, "
                "loss function), or (output, None) before the last stage"
            )
        output, loss_func = result
        return output, None if loss_func is None else losses.wrap(loss_func)

    return step


def _parameters(function: ForwardStepCallable) -> list[inspect.Parameter]:
    return [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]


def _hints(function: ForwardStepCallable) -> dict[str, Any]:
    """Resolved annotations; of `__call__` for a functor. Annotations that cannot be resolved stay as written."""
    target = function.func if isinstance(function, partial) else function
    if not inspect.isroutine(target):
        target = type(target).__call__
    try:
        return typing.get_type_hints(target)
    except (NameError, TypeError):
        return {}


def _is_state(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return annotation.rsplit(".", 1)[-1].strip("'\"") == GlobalState.__name__
    return isinstance(annotation, type) and issubclass(annotation, GlobalState)


def _name(function: Any) -> str:
    function = function.func if isinstance(function, partial) else function
    return getattr(function, "__name__", type(function).__name__)
