"""`mimo-train check`: values of `data` that cannot be end no check, and hide no fault of the shards."""

import dataclasses
from pathlib import Path

import pytest

from encoders.ranges import rules_of
from mimo_train.config.schema_data import DataConfig
from tests.unit.preflight.check.printed import run
from tests.unit.preflight.check.shards import on, record, shard, sound


def _beyond() -> list[tuple[str, str]]:
    """Colours that are none, and a value on each side of what a number of `data` may be."""
    found = [("background", "blue"), ("background", "")]
    for field in dataclasses.fields(DataConfig):
        if type(field.default) in (int, float):
            rules = rules_of(field)
            found.append((field.name, f"{rules.at_least - 1:g}"))
            if rules.below or rules.at_most:
                found.append((field.name, f"{rules.below or 2 * rules.at_most:.0f}"))
    return found


@pytest.mark.parametrize(("name", "value"), _beyond())
def test_values_that_cannot_be_are_faults_beside_those_of_shards(name, value, capsys):
    shard(Path("s/a.tar"), *sound(), ("bad.json", record("<image>\nWhere is it?")))
    shard(Path("held/a.tar"), *sound())
    given = {"data.validation_shards": "held", f"data.{name}": value}
    code, out, faults = run(capsys, *on("s", **given))
    assert code == 1
    assert [fault for fault in faults if fault.startswith(f"data.{name}: ")]
    assert "1 of 1 shard can be read, 5 samples" in out
    reads = name != "sequence_length"
    assert reads == any("key bad: " in fault for fault in faults)
