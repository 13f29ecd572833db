"""Fixtures of the tests of `check`."""

import pytest

from mimo_train.config import compose
from tests.unit.configs import load


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """Run in a temporary folder with relative paths, so that equal overrides are composed once."""
    monkeypatch.chdir(tmp_path)

    def loaded(config, overrides=(), *, without_data=False, weights=True):
        return load(config, *overrides, without_data=without_data)

    monkeypatch.setattr(compose, "load", loaded)
