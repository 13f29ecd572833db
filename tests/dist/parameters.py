"""The parameters that a run ended with: gathered whole from its last checkpoint, at whatever layout it was written.

A checkpoint names every tensor by its module and place in the whole model, layers counted over all stages and experts
over all ranks, and stores which part of the whole each rank wrote. Reading it on one process therefore gathers it over
tensor, pipeline and expert parallel ranks, without any layout. Trained parameters are stored as fp32 master copies.
"""

import re
from pathlib import Path

import numpy as np

from mimo_train.checkpoint import folders
from tests.dist.ranks import run_ranks

NUMBER = re.compile(r"\.\d+\.")
"""Of a layer or an expert in a parameter's name."""


def parameters_of(run_dir: Path) -> dict[str, np.ndarray]:
    """Every parameter of the newest checkpoint of a run, whole, by name; fails unless all have their moments there."""
    (parameters,) = run_ranks(_read, 1, str(folders.newest(run_dir)))
    return parameters


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    """Every parameter of a checkpoint, whole, by name."""
    (parameters,) = run_ranks(_read, 1, str(folder), ())
    return parameters


def largest_change(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> tuple[float, str]:
    """Largest difference of a parameter, as a root mean square over its elements, and the parameter's name."""
    assert sorted(one) == sorted(other), f"parameters differ by name: {sorted(one.keys() ^ other.keys())}"
    assert all(one[name].shape == other[name].shape for name in one), "parameters differ in shape"
    return max((float(np.sqrt(np.mean((one[name] - other[name]) ** 2))), name) for name in one)


def _read(folder: str, moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")) -> dict[str, np.ndarray]:
    """Parameters by name, those of all layers or experts together, all of them trained ones."""
    from mimo_train.checkpoint.format.index import WEIGHT
    from mimo_train.checkpoint.format.read import Reader

    reader = Reader(Path(folder))
    keys = sorted(key for key in reader.index.pieces if not key.module.startswith("rank_"))
    weights = {key[:2] for key in keys if key.state == WEIGHT}
    for moment in moments:
        of = {key[:2] for key in keys if key.state == moment}
        assert of == weights, f"parameters without their {moment}, or the other way round: {of ^ weights}"
    alike: dict[str, list[np.ndarray]] = {}
    for key in keys:
        if key.state == WEIGHT:
            name = NUMBER.sub(".*.", f"{key.module}.{key.name}")
            alike.setdefault(name, []).append(reader.whole(key).double().numpy())
    return {name: np.stack(parts) for name, parts in alike.items()}
