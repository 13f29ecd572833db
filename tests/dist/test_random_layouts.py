"""Legal layouts drawn at random train to the numbers of one process.

The same layouts at every run; MIMO_RANDOM_LAYOUTS=200 draws that many others.
"""

import functools
import os

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings

from data.demo.make import make_demo
from mimo_train.layout.run import config_faults, resolve
from tests.dist.runs import TOLERANCE, config, curve, largest_difference, train_on_ranks
from tests.random_layouts import Layout, legal_layouts, one_process

EXAMPLES = int(os.environ.get("MIMO_RANDOM_LAYOUTS", "0"))
MOST_RANKS = 6


def drawn(default: int) -> settings:
    """A few examples, always the same; not made smaller after a failure, which would train for long."""
    return settings(
        max_examples=EXAMPLES or default,
        derandomize=not EXAMPLES,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    """The samples of the shipped runs; most have no image."""
    folder = tmp_path_factory.mktemp("demos")
    images = make_demo(folder / "sparse", train_samples=480, held_out_samples=40, shards=2, text_only_fraction=0.7)
    return {"vlm_digits": images, "gpt_tiny": make_demo(folder / "prose", "text")}


@pytest.fixture(scope="module")
def config_of(demos, tmp_path_factory):
    """Gives the config of a short run at a layout."""

    def of(layout: Layout):
        short = ("train.iters=3", "data.sequence_length=72")
        return config(layout.config, tmp_path_factory.mktemp("run"), demos[layout.config], *short, *layout.overrides)

    return of


@pytest.fixture(scope="module")
def one_process_curve(config_of):
    """Gives the curve of some modules on one process, which are trained once."""
    return functools.cache(lambda modules: curve(train_on_ranks(config_of(one_process(modules)))))


@drawn(8)
@given(layout=legal_layouts(MOST_RANKS))
def test_a_legal_layout_trains_to_the_numbers_of_one_process(layout, config_of, one_process_curve):
    note(" ".join(layout.overrides))
    cfg = config_of(layout)
    assert config_faults(cfg) == []
    assert resolve(cfg).layout.world_size <= MOST_RANKS
    one = one_process_curve(tuple(layout.sizes))
    assert max(largest_difference(one, curve(train_on_ranks(cfg)))) < TOLERANCE
