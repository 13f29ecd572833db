"""How a run pads its texts: what parallel ranks need, and what losses of routers do."""

import pytest

from mimo_train.config.compose import load
from mimo_train.inputs.padding import padding_of

LAYOUT, LLM = "modules.language.layout", "modules.language.llm"
EXPERTS = "llm@modules.language.llm=gpt_tiny_moe"


@pytest.mark.parametrize(
    ("changes", "unit"),
    [
        ((), 8),
        ((f"{LAYOUT}.tp=4",), 8),
        ((f"{LAYOUT}.tp=4", f"{LAYOUT}.sp=true"), 8),
        ((f"{LAYOUT}.tp=3", f"{LAYOUT}.sp=true"), 24),
        ((f"{LAYOUT}.cp=8",), 16),
        ((f"{LAYOUT}.cp=3", f"{LAYOUT}.tp=2", f"{LAYOUT}.sp=true"), 24),
    ],
)
def test_rows_are_multiples_of_what_is_split(changes, unit):
    padding = padding_of(load("gpt_tiny", changes))
    assert padding is not None and padding.unit == unit and not padding.equal


@pytest.mark.parametrize(
    ("changes", "equal"),
    [
        ((), True),
        ((f"{LLM}.router_balancing=global_aux_loss", f"{LAYOUT}.tp=4", f"{LAYOUT}.sp=true", f"{LAYOUT}.cp=2"), True),
        ((f"{LLM}.router_aux_loss=0",), False),
        ((f"{LLM}.router_balancing=none",), False),
        ((f"{LLM}.router_balancing=none", f"{LLM}.router_z_loss=0.01"), True),
    ],
)
def test_rows_that_losses_of_routers_are_means_over_are_as_long_at_any_layout(changes, equal):
    padding = padding_of(load("gpt_tiny", (EXPERTS, *changes)))
    assert padding is not None and (padding.equal, padding.unit) == (equal, 64 if equal else 8)


def test_rows_of_the_sequence_length_are_made_of_samples_in_their_order():
    assert padding_of(load("gpt_tiny", ("data.pad=sequence",))) is None
