"""Find, fingerprint and rebuild the frozen weights that a checkpoint with `checkpoint.trained_only` leaves out.

A run that resumes from such a checkpoint gets these weights as the first start did, from `checkpoint.weights` or its
seed, and compares fingerprints.
"""

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from data.errors import DataError
from data.storage.url import Place
from mimo_train.checkpoint import folders
from mimo_train.checkpoint.folders import LEFT_OUT
from mimo_train.checkpoint.format.spans import Span
from mimo_train.checkpoint.local_shards import LocalShard
from mimo_train.checkpoint.resume.config_diff import initial_weights
from mimo_train.config.errors import UserError
from mimo_train.layout.run import Run
from mimo_train.models.parameters import seed_for

_CHUNK = 1 << 22
"""Elements hashed at once."""
_MASK = (1 << 64) - 1
_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""Odd constants of splitmix64 (Steele, Lea, Flood 2014, doi 10.1145/2660193.2660195), as signed numbers."""


def is_frozen(shard: LocalShard, released: Collection[torch.nn.Parameter]) -> bool:
    """True if a run never trains this tensor.

    Args:
        released: parameters that are frozen now and trained later.
    """
    tensor = shard.tensor
    later = any(tensor is parameter for parameter in released)
    return isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad and not later


def fingerprint(weights: Collection[LocalShard]) -> str:
    """Return a fingerprint of weights that is equal at every layout. Collective over the world.

    It is a sum over elements of a hash of tensor, position in the whole tensor, and value.

    Returns:
        The number of elements, and 16 hexadecimal digits.
    """
    total = count = 0
    for shard in weights:
        if not any(shard.replica):
            for first, last, span in shard.spans(0, shard.tensor.numel()):
                total += _hash(shard, span, shard.tensor.detach().reshape(-1)[first:last])
                count += last - first
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (total & _MASK, count))
    return f"{sum(count for _, count in everyone):,} weights {sum(total for total, _ in everyone) & _MASK:016x}"


def require_same(record: dict[str, Any], missing: Collection[LocalShard], folder: Place) -> None:
    """Require that the left-out weights equal those of the checkpoint's run. Collective.

    Raises:
        UserError: they differ; on every rank.
    """
    was, now = record[LEFT_OUT], fingerprint(missing)
    if was != now:
        sources = _sources(record["config"])
        raise UserError(
            f"{next(iter(sources))}: checkpoint {folder} has trained weights only, and the frozen weights differ from "
            f"those of its run (fingerprint {now}, expected {was}). Its run took them from "
            f"{', '.join(f'{key}={value}' for key, value in sources.items())}: restore what has changed there"
        )


def _sources(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sources of a run's frozen weights by key, always with its seed."""
    encoders = {name: module.get("encoder") or {} for name, module in config["modules"].items()}
    joined = {
        f"modules.{name}.encoder.{key}": value
        for name, encoder in encoders.items()
        for key, value in encoder.items()
        if key.endswith("pretrained") and value
    }
    return initial_weights(config) | joined | {"run.seed": config["run"]["seed"]}


def _hash(shard: LocalShard, span: Span, data: torch.Tensor) -> int:
    """Return the sum over a box's elements of splitmix64 of (tensor, position, bits).

    Args:
        data: [span.numel], a whole box.
    """
    of_tensor = seed_for(0, shard.module, shard.name, *span.shape, data.dtype)
    bits = data.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[data.element_size()])
    total = 0
    for number, value in enumerate(bits.reshape(-1).split(_CHUNK)):
        mixed = _mixed(_places(span, number * _CHUNK, value) * _MIX[0] + of_tensor) ^ value.long()
        total += int(_mixed(mixed * _MIX[0]).sum())
    return total


def _places(span: Span, first: int, values: torch.Tensor) -> torch.Tensor:
    """Return positions in the whole tensor of a chunk of a box's elements; chunks save memory."""
    left = torch.arange(first, first + values.numel(), device=values.device)
    places, step = torch.zeros_like(left), 1
    for offset, size, length in reversed(list(zip(span.offset, span.size, span.shape, strict=True))):
        places += (left % size + offset) * step
        left //= size
        step *= length
    return places


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    for shift, factor in ((30, _MIX[1]), (27, _MIX[2])):
        numbers = (numbers ^ (numbers >> shift)) * factor
    return numbers ^ (numbers >> 31)


def loads_every_weight(run: Run) -> bool:
    """True if every checkpoint that this start may resume from has all weights of the model, as rank 0 sees it. False
    if a record is unreadable. Collective."""
    box, resume = [False], run.cfg.checkpoint.resume
    if dist.get_rank() == 0:
        with suppress(UserError, DataError, OSError):  # `Checkpointer.resume` reports it on every rank
            chosen = None if resume == "auto" else folders.chosen(run.checkpoints, resume)
            paths = folders.newest_first(run.checkpoints) if resume == "auto" else [chosen] if chosen else []
            box = [bool(paths) and all(LEFT_OUT not in folders.read_record(path) for path in paths)]
    dist.broadcast_object_list(box)
    return box[0]
