"""Layouts drawn at random: legal ones train to the numbers of one process, illegal ones are refused before start, by
`mimo-train check`, `mimo-train train` and `pretrain` with the same words.

The same layouts at every run; MIMO_RANDOM_LAYOUTS=200 draws that many others of each kind.
"""

import contextlib
import functools
import io
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings

from data.demo.make import make_demo
from mimo_train.layout.run import config_faults, resolve
from tests.dist.ranks import run_ranks
from tests.dist.runs import TOLERANCE, config, curve, largest_difference, train_on_ranks
from tests.random_layouts import Layout, illegal_layouts, legal_layouts, one_process

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


def test_illegal_layouts_are_refused_everywhere_with_the_same_words(config_of):
    broken = _examples(20, illegal_layouts(MOST_RANKS))
    cfgs = [config_of(one.layout) for one in broken]
    faults = [[str(fault) for fault in config_faults(cfg)] for cfg in cfgs]
    (said,) = run_ranks(_all_refused, 1, cfgs)
    for one, cfg, expected, (checked, trained, raised) in zip(broken, cfgs, faults, said, strict=True):
        assert any(fault.startswith(one.key) for fault in expected), (one.layout.overrides, expected)
        assert checked == trained == raised == expected, one.layout.overrides
        assert not any(Path(cfg.run.dir).iterdir()), "something was written"


def _examples(default: int, strategy) -> list:
    found = []

    @drawn(default)
    @given(strategy)
    def draw(example):
        found.append(example)

    draw()
    return found


def _all_refused(cfgs: list) -> list[tuple[list[str], ...]]:
    return [_refused(cfg) for cfg in cfgs]


def _refused(cfg) -> tuple[list[str], ...]:
    """The faults that `check`, `train` and `pretrain` name."""
    from mimo_train.cli import main
    from mimo_train.config.compose import to_yaml
    from mimo_train.config.errors import ConfigError
    from mimo_train.training.pretrain import pretrain

    path, printed = Path(cfg.run.dir).with_suffix(".yaml"), []
    path.write_text(to_yaml(cfg))
    for command in ("check", "train"):
        out = io.StringIO()
        with contextlib.redirect_stderr(out), contextlib.redirect_stdout(out):
            assert main([command, str(path)]) == 1
        lines = [line for line in out.getvalue().splitlines() if line.startswith("error: ")]
        printed.append([line.removeprefix("error: ") for line in lines])
    with pytest.raises(ConfigError) as error:
        pretrain(cfg)
    return *printed, str(error.value).splitlines()
