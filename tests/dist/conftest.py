"""Demo shards that all distributed tests share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def digits(tmp_path_factory) -> Path:
    """A small digits demo: images, text-only samples and samples with two images."""
    from data.demo.make import make_demo

    return make_demo(tmp_path_factory.mktemp("digits"), train_samples=480, held_out_samples=40, shards=2)


@pytest.fixture(scope="session")
def pairs(digits, tmp_path_factory) -> Path:
    """Samples of the digits demo as pairs of answers."""
    from tests.dist.pairs import write_pairs

    return write_pairs(min((digits / "train").glob("*.tar")), tmp_path_factory.mktemp("pairs"))["pairs"]


@pytest.fixture(scope="session")
def prose(tmp_path_factory) -> Path:
    """The prose demo."""
    from data.demo.make import make_demo

    return make_demo(tmp_path_factory.mktemp("prose"), "text")
