"""Forward steps: those of a `MimoModel` and of a plain GPT, and the accepted signatures of a user's."""

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from data.order.step import Microbatch
from mimo_train.config.errors import ConfigError, UserError
from mimo_train.config.user_code import FORWARD_STEP, load_code, unusable_code
from mimo_train.models.documents import documents_of
from mimo_train.models.language_model import choose_logits, leave_out
from mimo_train.parallel.context import own_part
from mimo_train.training.step.losses import StepLosses
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

MODEL_INPUTS = (
    "input_ids",
    "position_ids",
    "labels",
    "loss_mask",
    "modality_inputs",
    "documents",
    "blocks",
    "feature_rows",
)
"""Keys of a microbatch that the model takes."""
LOSS_KEYS = ("labels", "sources", "answers")
"""Keys of a microbatch with a value for each token, [batch, sequence], that the loss takes besides its mask."""
LEARNED, LESSON, PADDING = "learned", "lesson", "padding"


def get_batch(data_iterator: Iterator[dict[str, Any]] | None) -> dict[str, Any] | None:
    """Return the next microbatch of this rank; None at the end, or without an iterator.

    Returns:
        On language ranks: input_ids, labels, position_ids, loss_mask [batch, sequence], the ends of the `documents` of
            a packed row, the `blocks` of tokens that see each other, the `feature_rows` of samples with several
            answers, and in a mixture sources [batch, sequence], which the model does not take. On encoder ranks:
            modality_inputs {module: {encoder: inputs} or None}. Ranks with both have all.
    """
    batch = next(data_iterator, None) if data_iterator is not None else None
    if batch is None:
        return None
    return Microbatch({key: batch[key] for key in (*MODEL_INPUTS, "sources") if key in batch})


def mimo_forward_step(
    state: GlobalState, data_iterator: Iterator[dict[str, Any]] | None, model: MimoModel
) -> tuple[torch.Tensor | dict[str, torch.Tensor], Callable | None]:
    """Run one forward pass of this rank's modules. Encoders return features; only the language model returns a loss.

    Returns:
        (loss per token, loss function) at the language model's last stage, else (features by module, None).

    Raises:
        TypeError: the last stage returned features by module instead of losses: modules and layout disagree.
    """
    batch = _next(data_iterator)
    inputs = {"input_ids": None} | {key: batch[key] for key in MODEL_INPUTS if key in batch}
    mimo_model = unwrap_model(model)
    if LEARNED in batch:
        choose_logits(mimo_model.language_model, batch[LEARNED], batch.get(LESSON))
    if PADDING in batch:
        leave_out(mimo_model.language_model, batch[PADDING])
    output, loss_mask = model(**inputs)
    if not (mimo_model.role.has_language_module and mimo_model.role.is_last_stage("language")):
        return output, None
    if isinstance(output, dict):
        raise TypeError(
            f"the language model's last stage returned features of {', '.join(output)} instead of a loss tensor: "
            "check that modules and modules.*.layout describe the same ranks"
        )
    groups = unwrap_model(mimo_model.language_model).pg_collection
    # The model cuts its own inputs, of which positions may have several axes.
    local = batch | own_part({key: batch[key] for key in LOSS_KEYS if key in batch}, groups.cp)
    return output, partial(state.task, local | {"loss_mask": loss_mask}, groups)


def gpt_forward_step(
    state: GlobalState,
    data_iterator: Iterator[dict[str, Any]],
    model: MegatronModule,
    return_schedule_plan: bool = False,
) -> tuple[Any, Callable]:
    """Run one forward pass of this rank's stage of a plain GPT.

    Args:
        return_schedule_plan: return the layers' plan instead of running them. Megatron-Core requests it to overlap the
            experts' communication with another microbatch.

    Returns:
        (loss per token [batch, sequence] or the stage's activations, loss function); the schedule calls the loss
            function at the last stage only.
    """
    batch = _next(data_iterator)
    groups = unwrap_model(model).pg_collection
    of_tokens = ("input_ids", "position_ids", "loss_mask", *LOSS_KEYS)
    local = batch | own_part({key: batch[key] for key in of_tokens if key in batch}, groups.cp)
    inputs: dict[str, Any] = {key: local[key] for key in ("input_ids", "position_ids", "labels") if key in local}
    inputs |= {"attention_mask": None, "packed_seq_params": documents_of(batch, groups.cp.size())}
    if return_schedule_plan:
        output = unwrap_model(model).build_schedule_plan(**inputs)
    else:
        if LEARNED in batch:
            choose_logits(model, batch[LEARNED], batch.get(LESSON))
        if PADDING in batch:
            leave_out(model, batch[PADDING])
        output = model(**inputs)
    return output, partial(state.task, local, groups)


def _next(data_iterator: Iterator[dict[str, Any]] | None) -> dict[str, Any]:
    batch = next(data_iterator, None) if data_iterator is not None else None
    if batch is None:
        raise UserError("the data ended before train.iters: data_iterator returned no microbatch")
    return batch


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
    return maybe_inject_state(forward_step_func, state)


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
    name = None if needs_injection is False else _state_parameter(forward_step_func)
    if name is None:
        return partial(forward_step_func, state) if needs_injection else forward_step_func
    place = [*inspect.signature(forward_step_func).parameters].index(name)
    if place == 1:
        raise TypeError(
            f"forward step {_name(forward_step_func)} takes the state as its second argument. Give it one of the forms "
            f"{'; '.join(ACCEPTED_FORMS)}"
        )
    return partial(forward_step_func, **{name: state}) if place else partial(forward_step_func, state)


def _state_parameter(function: ForwardStepCallable) -> str | None:
    """Return the name of the state's parameter, if there is one that the caller has not bound."""
    parameters = [*inspect.signature(function).parameters.values()]
    bound = function.keywords if isinstance(function, partial) else {}
    for parameter in parameters:
        annotation = parameter.annotation
        text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
        names = set(re.findall(r"\w+(?![\w.])", text))  # without the modules before them
        if parameter.name not in bound and "GlobalState" in names <= _STATE_ANNOTATION:
            return parameter.name
    first = parameters[0] if parameters else None
    is_named = first is not None and first.kind in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD)
    return first.name if first is not None and is_named and first.name in ("state", "global_state") else None


_STATE_ANNOTATION = {"GlobalState", "None", "Optional", "Union", "ForwardRef"}
"""Words of an annotation that takes the state or None."""


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


def _name(function: Any) -> str:
    function = function.func if isinstance(function, partial) else function
    return getattr(function, "__name__", type(function).__name__)
