"""Forward steps: the accepted signatures, how the state is passed to them, and a pass over microbatches."""

import inspect
import re
import types
import typing
from collections.abc import Callable
from functools import partial
from typing import Any

from mimo_train.config.errors import ConfigError
from mimo_train.config.user_code import FORWARD_STEP, load_code, unusable_code
from mimo_train.optim.module_optimizer import ModuleOptimizer
from mimo_train.training.step.batches import StepIterator
from mimo_train.training.step.losses import StepLosses
from mimo_train.training.step.schedule import Pipeline
from mimo_train.training.step.state import GlobalState

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
    """Return the forward step of `train.forward_step`: the function of that name, or an instance of the class. Raises
    ConfigError if it cannot be imported, instantiated or called."""
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
    """Return the forward step as the schedule calls it, with the state itself bound if its signature has one."""
    return maybe_inject_state(forward_step_func, state, needs_global_state_injection(forward_step_func))


def needs_global_state_injection(forward_step_func: ForwardStepCallable) -> bool:
    """True if the forward step takes the state: a parameter is annotated `GlobalState` or `GlobalState | None`, or the
    first parameter is called `state` or `global_state`."""
    return _state_parameter(forward_step_func) is not None


def maybe_inject_state(
    forward_step_func: ForwardStepCallable, state: GlobalState, needs_injection: bool | None = None
) -> ForwardStepCallable:
    """Bind `state` to its parameter if the forward step takes it.

    Args:
        needs_injection: known result of `needs_global_state_injection`; True binds the first parameter if no parameter
            is the state's.

    Raises:
        TypeError: the parameter of the state is between the data iterator and the model.
    """
    if needs_injection is False:
        return forward_step_func
    name, parameters = _state_parameter(forward_step_func), list(inspect.signature(forward_step_func).parameters)
    if name is None and needs_injection is None:
        return forward_step_func
    place = parameters.index(name) if name is not None else 0
    if place == 1:
        raise TypeError(
            f"forward step {_name(forward_step_func)} takes the state as its second argument. Give it one of the forms "
            f"{'; '.join(ACCEPTED_FORMS)}"
        )
    return partial(forward_step_func, **{name: state}) if place and name else partial(forward_step_func, state)


def record_losses(forward_step_func: ForwardStepCallable, losses: StepLosses) -> ForwardStepCallable:
    """Return the forward step with its loss functions normalised and their reports kept in `losses`. When called, it
    raises TypeError unless the forward step returns (output, loss function or None)."""

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


def forward_backward(
    pipeline: Pipeline,
    optimizer: ModuleOptimizer,
    losses: StepLosses,
    forward_step: ForwardStepCallable,
    data: StepIterator,
    num_microbatches: int,
) -> None:
    """Run the next `num_microbatches` of `data` forward and backward, from gradients of zero. Collective. `losses` then
    has only their losses; `forward_step` is a prepared one."""
    optimizer.zero_grad()
    for chunk in pipeline.model:
        chunk.zero_grad_buffer()
    losses.begin()
    with pipeline.stopwatch("forward_backward"):
        pipeline.run(record_losses(forward_step, losses), data, num_microbatches=num_microbatches)


def _state_parameter(function: ForwardStepCallable) -> str | None:
    """Return the name of the state's parameter, if there is one that the caller has not bound."""
    parameters = [*inspect.signature(function).parameters.values()]
    bound = function.keywords if isinstance(function, partial) else {}
    hints = _hints(function)
    for parameter in parameters:
        if parameter.name not in bound and _is_state(hints.get(parameter.name, parameter.annotation)):
            return parameter.name
    first = parameters[0] if parameters else None
    named = first is not None and first.kind in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD)
    return first.name if first is not None and named and first.name in _STATE_NAMES else None


def _hints(function: ForwardStepCallable) -> dict[str, Any]:
    """Return the resolved annotations, of `__call__` for a functor; empty if one cannot be resolved."""
    target = function.func if isinstance(function, partial) else function
    if not inspect.isroutine(target):
        target = type(target).__call__
    try:
        return typing.get_type_hints(target)
    except (NameError, TypeError, AttributeError):
        return {}


def _is_state(annotation: Any) -> bool:
    """True if an annotation is `GlobalState` or `GlobalState | None`, also as a string that cannot be resolved."""
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        members = re.sub(r"^(?:\w+\.)*(?:Optional|Union)\[(.*)\]$", r"\1", annotation.strip(" '\""))
        names = [member.strip(" '\"").rpartition(".")[2] for member in re.split(r"[|,]", members)]
        return GlobalState.__name__ in names
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(map(_is_state, typing.get_args(annotation)))
    return isinstance(annotation, type) and issubclass(annotation, GlobalState)


def _name(function: Any) -> str:
    function = function.func if isinstance(function, partial) else function
    return getattr(function, "__name__", type(function).__name__)
