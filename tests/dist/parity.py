"""Runs of the parity table, and how far two of them are from each other."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.demo.make import make_demo
from tests.dist.layout_tables import MODELS, Row
from tests.dist.parameters import largest_change, parameters_of
from tests.dist.runs import RATE, STEPS, Bounds, config, curve, largest_difference, train_on_ranks
from tests.dist.stretched import stretch_images


@dataclass(frozen=True)
class Trained:
    """What is left of a run."""

    points: list[tuple[int, float, float]]
    """(step, loss, gradient norm) of every step."""
    parameters: dict[str, np.ndarray]
    """At the end, whole, by name."""


@dataclass(frozen=True)
class Difference(Bounds):
    """The largest differences between two runs of one model."""

    name: str
    """The parameter that differs most."""


def make_demos(folder: Path) -> dict[str, Path]:
    """The samples of the models; of `sparse`, most have no image; of `sizes`, images have many sizes."""
    sizes = {"train_samples": 480, "held_out_samples": 40, "shards": 2}
    digits = make_demo(folder / "digits", **sizes)
    return {
        "digits": digits,
        "sizes": stretch_images(digits, folder / "sizes"),
        "mixed": make_demo(folder / "mixed", "mixed", train_samples=320, held_out_samples=16, shards=2),
        "sparse": make_demo(folder / "sparse", **sizes, text_only_fraction=0.7),
        "prose": make_demo(folder / "prose", "text"),
    }


def config_of(model: str, demos: dict[str, Path], run_dir: Path, row: Row | None = None, *changes: str):
    """The config of a model of `MODELS` at the layout of a row, or on one process."""
    found = MODELS[model]
    layout = [f"train.micro_batch_size={found.microbatch}"] if row is None else row.overrides(found.microbatch)
    steps = f"train.iters={STEPS}"
    return config(found.config, run_dir, demos[found.demo], steps, *found.overrides, *layout, *changes)


def trained(*of) -> Trained:
    """Train what `config_of` gives for these arguments."""
    cfg = config_of(*of)
    return Trained(curve(train_on_ranks(cfg)), parameters_of(Path(cfg.run.dir)))


def difference(one: Trained, other: Trained) -> Difference:
    """How far the second run is from the first."""
    change, name = largest_change(one.parameters, other.parameters)
    return Difference(*largest_difference(one.points, other.points), change / RATE, name)


def within(model: str, found: Difference) -> bool:
    """Whether a difference is within the bounds of a model of `MODELS`."""
    bounds = MODELS[model].bounds
    return found.loss < bounds.loss and found.norm < bounds.norm and found.parameter < bounds.parameter
