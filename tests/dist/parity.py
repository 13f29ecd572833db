"""Runs of the parity table, and how far two of them are from each other."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.demo.make import make_demo, make_mixed_demo, make_text_demo
from tests.dist.layout_tables import MODELS, Row
from tests.dist.parameters import largest_change, parameters_of
from tests.dist.runs import STEPS, config, curve, largest_difference, train_on_ranks
from tests.dist.stretched import stretch_pictures


@dataclass(frozen=True)
class Trained:
    """What is left of a run."""

    points: list[tuple[int, float, float]]
    """(step, loss, gradient norm) of every step."""
    parameters: dict[str, np.ndarray]
    """At the end, whole, by name."""


@dataclass(frozen=True)
class Difference:
    """The largest differences between two runs of one model."""

    loss: float
    """Relative."""
    norm: float
    """Relative, of the gradient norm."""
    parameter: float
    """Root mean square over the elements of the parameter that differs most, as a part of the peak learning rate."""
    name: str
    """That parameter."""


def make_demos(folder: Path) -> dict[str, Path]:
    """The samples of the models; of `sparse`, most have no picture; of `sizes`, pictures have many sizes."""
    sizes = {"train_samples": 480, "held_out_samples": 40, "shards": 2}
    digits = make_demo(folder / "digits", **sizes)
    return {
        "digits": digits,
        "sizes": stretch_pictures(digits, folder / "sizes"),
        "mixed": make_mixed_demo(folder / "mixed", train_samples=320, held_out_samples=16, shards=2),
        "sparse": make_demo(folder / "sparse", **sizes, text_only_fraction=0.7),
        "prose": make_text_demo(folder / "prose"),
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
    return Difference(*largest_difference(one.points, other.points), change / LEARNING_RATE, name)


def within(model: str, found: Difference) -> bool:
    """Whether a difference is within the bounds of a model of `MODELS`: its tolerance for losses and gradient norms,
    and for parameters as below."""
    tolerance = MODELS[model].tolerance
    return max(found.loss, found.norm) < tolerance and found.parameter < PARAMETERS * tolerance


LEARNING_RATE = 1e-3
"""Peak rate of all models."""

PARAMETERS = 50
"""Largest change of a parameter, in learning rates, by the tolerance of losses.

Adam moves every element by about the learning rate in a step, whatever the size of its gradient, so a parameter's
distance is measured in learning rates and not by its own norm, which its first value dominates: one gradient that is
wrong in one step of 20 shows as a tenth or more. In fp32 the bound is 5e-4, and rounding gives 5e-5 at most; in
bf16 the gradients of small parameters are rounding to a good part, and the bound is half a step."""
