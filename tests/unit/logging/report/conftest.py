"""A run that the tests of the report share."""

import pytest

from mimo_train.config.compose import load
from mimo_train.layout.run import resolve


@pytest.fixture(scope="module")
def vlm():
    """A short run on two processes."""
    cfg = load("vlm_digits", ["train.iters=40", "train.global_batch_size=32"])
    return resolve(cfg)
