"""Every documented form of a forward step, and clear errors for the others."""

from functools import partial
from types import SimpleNamespace
from typing import Optional

import pytest

from mimo_train.config.errors import ConfigError
from mimo_train.training.pretrain import default_forward_step, pretrain
from mimo_train.training.step.forward_step import (
    load_forward_step,
    needs_global_state_injection,
    prepare_forward_step_func,
    record_losses,
)
from mimo_train.training.step.state import GlobalState
from tests.unit.configs import load

STATE = SimpleNamespace(step=0)


def two(data_iterator, model):
    return "two", data_iterator, model


def three_named(state, data_iterator, model):
    return state, data_iterator, model


def three_quoted(anything: "GlobalState", data_iterator, model):
    return anything, data_iterator, model


def four(state: GlobalState, data_iterator, model, return_schedule_plan: bool = False):
    return state, data_iterator, model, return_schedule_plan


class Functor:
    def __call__(self, state: GlobalState, data_iterator, model):
        return state, data_iterator, model


class Wants:
    """Cannot be instantiated without arguments."""

    def __init__(self, path):
        pass


def test_a_config_names_a_function_or_a_class():
    assert load_forward_step(f"{__name__}:two") is two
    assert isinstance(load_forward_step(f"{__name__}:Functor"), Functor)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("nowhere:step", "No module named 'nowhere'"),
        (f"{__name__}:nothing", "has no attribute 'nothing'"),
        (f"{__name__}:STATE", "expected a function or a class with __call__, got SimpleNamespace"),
        (f"{__name__}:Wants", "missing 1 required positional argument: 'path'"),
    ],
)
def test_a_named_forward_step_that_cannot_be_used_is_a_config_error(entry, why):
    with pytest.raises(ConfigError) as caught:
        load_forward_step(entry)
    (fault,) = caught.value.faults
    assert fault.key == "train.forward_step" and repr(entry) in fault.message and why in fault.message


def test_a_function_in_a_config_is_an_error():
    cfg = load("gpt_tiny")
    cfg.train.forward_step = two
    (fault,) = [fault for fault in cfg.faults() if fault.key == "train.forward_step"]
    assert "must be package.module:name, got <function two" in fault.message and "to pretrain" in fault.message


def test_a_program_cannot_pass_another_forward_step_than_its_config_names():
    cfg = load("gpt_tiny", f"train.forward_step={__name__}:two")
    assert default_forward_step(cfg) is two
    with pytest.raises(ConfigError, match="train.forward_step"):
        pretrain(cfg, two)


def optional_union(context: GlobalState | None, data_iterator, model):
    return context, data_iterator, model


def optional_quoted_inside(context: Optional["GlobalState"], data_iterator, model):
    return context, data_iterator, model


def unresolved(context: "Optional[state_types.GlobalState]", data_iterator, model: "Absent"):  # noqa: F821, UP045
    return context, data_iterator, model


def last(data_iterator, model, context: GlobalState | None = None):
    return context, data_iterator, model


def by_name(data_iterator, model, *, context: GlobalState):
    return context, data_iterator, model


exec(  # as a module of its own that postpones annotations
    compile(
        "from __future__ import annotations\n"
        "def postponed(context: GlobalState | None, data_iterator, model):\n"
        "    return context, data_iterator, model\n",
        "postponed",
        "exec",
    )
)
OPTIONAL = (optional_union, optional_quoted_inside, unresolved, last, by_name, postponed)  # noqa: F821


@pytest.mark.parametrize("function", OPTIONAL, ids=lambda function: function.__name__)
def test_an_optional_state_is_bound_whatever_its_name_and_place(function):
    assert needs_global_state_injection(function)
    assert prepare_forward_step_func(function, STATE)("data", "model") == (STATE, "data", "model")


def list_of_states(states: list[GlobalState], data_iterator):
    return states, data_iterator


def quoted_list(states: "list[GlobalState]", model: "Absent"):  # noqa: F821
    return states, model


@pytest.mark.parametrize("function", [list_of_states, quoted_list, partial(last, context=STATE)])
def test_other_types_and_a_state_that_the_caller_has_bound_stay(function):
    assert prepare_forward_step_func(function, SimpleNamespace()) is function


def test_a_state_between_the_other_arguments_is_rejected():
    def between(data_iterator, context: GlobalState, model):
        return context

    with pytest.raises(TypeError, match="between takes the state as its second argument"):
        prepare_forward_step_func(between, STATE)


def test_forms_without_state_are_used_as_they_are():
    assert not needs_global_state_injection(two)
    assert prepare_forward_step_func(two, STATE) is two


@pytest.mark.parametrize("function", [three_named, three_quoted, four, Functor()])
def test_forms_with_state_receive_the_state_itself(function):
    assert needs_global_state_injection(function)
    assert prepare_forward_step_func(function, STATE)("data", "model")[:3] == (STATE, "data", "model")


def test_partial_of_a_form_is_read_through():
    assert needs_global_state_injection(partial(four, return_schedule_plan=True))


def test_other_signatures_get_the_state_only_by_its_name():
    assert not needs_global_state_injection(lambda: None)
    assert not needs_global_state_injection(lambda a, b, c: None)
    assert needs_global_state_injection(lambda state, a, b, c, d: None)


class Kept:
    """Stands for `StepLosses`."""

    def wrap(self, loss_func):
        return ("kept", loss_func)


def test_loss_functions_are_recorded_and_options_reach_the_step():
    seen = {}

    def step(data_iterator, model, return_schedule_plan=False):
        seen["plan"] = return_schedule_plan
        return model, len if model else None

    assert record_losses(step, Kept())("data", "model", return_schedule_plan=True) == ("model", ("kept", len))
    assert seen["plan"] is True
    assert record_losses(step, Kept())("data", "") == ("", None)


@pytest.mark.parametrize("result", [1.5, (1, 2, 3), (1, "no function")])
def test_a_wrong_return_is_named_with_the_accepted_forms(result):
    def my_step(data_iterator, model):
        return result

    with pytest.raises(TypeError, match=r"forward step my_step returned .*must return \(output, loss function\)"):
        record_losses(my_step, Kept())("data", "model")
