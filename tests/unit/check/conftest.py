"""What tests of `check` share."""

import pytest

from mimo_train.config import compose
from tests.unit.configs import load


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """In a folder of our own, with relative paths, so that equal overrides are composed once."""
    monkeypatch.chdir(tmp_path)
    composed = compose.load

    def loaded(config, overrides=(), *, without_data=False):
        return composed(config, overrides, without_data=True) if without_data else load(config, *overrides)

    monkeypatch.setattr(compose, "load", loaded)
