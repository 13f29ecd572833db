"""Nested plain values: back as they went in, and nothing else."""

import enum
import json
import random
from typing import NamedTuple

import numpy
import pytest
import torch

from mimo_train.checkpoint import rank_state
from mimo_train.checkpoint.format.files import Damage
from mimo_train.checkpoint.rank_state import pack, unpack


class Kind(enum.Enum):
    ONE = 1


class Place(NamedTuple):
    name: str
    number: int


def test_the_states_of_generators_come_back():
    state = {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}
    text, tensors = pack(state)
    found = unpack(text, tensors)
    assert found["python"] == state["python"] and torch.equal(found["torch"], state["torch"])
    assert found["numpy"][0] == state["numpy"][0] and (found["numpy"][1] == state["numpy"][1]).all()
    assert found["numpy"][2:] == state["numpy"][2:]


def test_values_keep_their_types(monkeypatch):
    monkeypatch.setattr(rank_state, "CLASSES", {"Kind": Kind, "Place": Place})
    value = {1: (2, [3.5, None]), "a": {"$": True}, Place("x", 4): Kind.ONE, "device": torch.device("cpu")}
    found = unpack(*pack(value))
    assert found == value and type(next(key for key in found if isinstance(key, tuple))) is Place


@pytest.mark.parametrize("value", [object(), Kind.ONE, Place("x", 1), {1, 2}, torch.zeros(2, dtype=torch.complex64)])
def test_anything_else_is_no_plain_value(value):
    with pytest.raises(TypeError):
        pack(value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"$": "enum", "of": "Kind", "value": "ONE"}',
        '{"$": "named", "of": "system", "value": ["ls"]}',
        '{"$": "tensor", "value": 3}',
        '{"$": "call", "value": []}',
        json.dumps([[]])[:-1],
        "[" * 100_000,
    ],
)
def test_text_that_names_something_else_is_refused(text):
    with pytest.raises(Damage):
        unpack(text, [])
