"""The parameters that a run ended with: gathered whole from its last checkpoint, at whatever layout it was written.

A checkpoint names every tensor by its module and place in the whole model, layers counted over all stages and experts
over all ranks, and stores which part of the whole each rank wrote. Reading it on one process therefore gathers it over
tensor, pipeline and expert parallel ranks, without any layout. Parameters of 16 bits count by their fp32 master copies.
"""

import re
from pathlib import Path

import numpy as np

from mimo_train.checkpoint import folders
from tests.dist.ranks import run_ranks

STATE = re.compile(r"mimo\.\w+\.optimizer\.state\.(\w+)\.(.+)")
"""Names of the optimizer's state: what it is, and the parameter's name."""


def parameters_of(run_dir: Path) -> dict[str, np.ndarray]:
    """Every parameter of the newest checkpoint of a run, whole, by name; fails unless all have their moments there."""
    (parameters,) = run_ranks(_read, 1, str(folders.newest(run_dir)))
    return parameters


def largest_change(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> tuple[float, str]:
    """Largest difference of a parameter, as a root mean square over its elements, and the parameter's name."""
    assert sorted(one) == sorted(other), f"parameters differ by name: {sorted(one.keys() ^ other.keys())}"
    assert all(one[name].shape == other[name].shape for name in one), "parameters differ in shape"
    return max((float(np.sqrt(np.mean((one[name] - other[name]) ** 2))), name) for name in one)


def _read(folder: str) -> dict[str, np.ndarray]:
    """Parameters by name, all of them trained ones."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    reader = FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    tensors = {name: entry for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}
    states = {name: found.groups() for name in tensors if (found := STATE.fullmatch(name))}
    parameters = sorted(tensors.keys() - states.keys())
    for kind in ("param", "exp_avg", "exp_avg_sq"):
        of = sorted(parameter for state, parameter in states.values() if state == kind)
        assert of == parameters, f"parameters without their {kind}, or the other way round: {set(of) ^ set(parameters)}"
    masters = [name for name, (kind, _) in states.items() if kind == "param"]
    whole = {name: torch.empty(tensors[name].size, dtype=torch.float32) for name in masters}
    _load_state_dict(whole, storage_reader=reader, no_dist=True)
    return {states[name][1]: whole[name].double().numpy() for name in masters}
