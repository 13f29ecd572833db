"""In-process restart as a choice of the config."""

import pytest

from mimo_train.config import keys
from mimo_train.layout.run import config_faults
from tests.unit.configs import load


def test_without_restarts_nothing_is_wrapped():
    from mimo_train.training.inprocess import with_restarts

    assert with_restarts(lambda store: ("lived", store), load("vlm_digits").run)() == ("lived", None)


def test_without_the_package_it_is_a_fault(monkeypatch):
    monkeypatch.setattr(keys, "is_installed", lambda name: False)
    (fault,) = config_faults(load("vlm_digits", "run.inprocess_restarts=2"))
    assert fault.key == "run.inprocess_restarts" and "pip install 'mimo-train[resiliency]'" in fault.message
    assert not config_faults(load("vlm_digits"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("run.inprocess_restarts=-1",), "at least 0"),
        (("run.timeout_minutes=0.25", "run.inprocess_restarts=2"), "above 0.25"),
        (("checkpoint.resume=never", "run.inprocess_restarts=2"), "must be auto"),
    ],
)
def test_impossible_values_are_faults(overrides, words, monkeypatch):
    monkeypatch.setattr(keys, "is_installed", lambda name: True)
    (fault,) = config_faults(load("vlm_digits", *overrides))
    assert overrides[0].startswith(f"{fault.key}=") and words in fault.message
