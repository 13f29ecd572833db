"""Adafactor (Shazeer and Stern, 2018, arXiv:1804.04235) with a learning rate from outside: second moments of a
matrix from the means of its rows and columns, no first moment, updates of a root mean square of at most 1. As the
Adafactor of transformers with `scale_parameter=False, relative_step=False`. Fused weights count as one matrix.
Parameters that are no matrices have a full second moment.

Ranks sum the squares of their parts, so that means are those of whole matrices at every layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from mimo_train.optim.moments import State
from mimo_train.optim.shards import Shard, gradient_of

DECAY = -0.8
"""The decay rate of step n is 1 - n ** DECAY."""

_LEAST_SQUARE = 1e-30
_LARGEST_RMS = 1.0

ROWS, COLUMNS = "exp_avg_sq_row", "exp_avg_sq_col"
"""States of a matrix: [rows] and [columns] of this rank's tensor-parallel part, equal on its replicas."""


@dataclass
class _Part:
    """A rank's range of a matrix, extended by zeros to whole rows."""

    shard: Shard
    rows: slice
    """Rows with elements of the range."""
    before: int
    """Elements of the first row in front of the range."""

    @classmethod
    def of(cls, shard: Shard) -> "_Part":
        width = shard.parameter.shape[1]
        rows = slice(shard.start // width, -(-shard.stop // width))
        return cls(shard, rows, shard.start - rows.start * width)

    def extended(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of the range as rows, zeros elsewhere."""
        width = self.shard.parameter.shape[1]
        after = (self.rows.stop - self.rows.start) * width - self.before - values.numel()
        return torch.nn.functional.pad(values.view(-1), (self.before, after)).view(-1, width)

    def range_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the elements of the range from rows."""
        return rows.reshape(-1)[self.before : self.before + self.shard.stop - self.shard.start]


def add_states(state: State, shard: Shard, like: torch.Tensor) -> None:
    """Add zeros."""
    if shard.parameter.dim() == 2:
        for name, size in zip((ROWS, COLUMNS), shard.parameter.shape, strict=True):
            state[name] = torch.zeros(size, device=like.device)
    else:
        state["exp_avg_sq"] = torch.zeros_like(like)


def adafactor(
    group: dict[str, Any],
    parameters: dict[int, torch.Tensor],
    states: dict[int, State],
    shards: Sequence[Shard],
    factor: float,
) -> None:
    """Update parameters by Adafactor. Collective over replicas and tensor-parallel ranks; arguments as in `muon`."""
    decay = 1.0 - group["step"] ** DECAY
    for shard, rows, columns in _means(shards, parameters, factor):
        if (state := states.get(id(shard.parameter))) is not None:
            state[ROWS].lerp_(rows + _LEAST_SQUARE, 1 - decay)
            state[COLUMNS].lerp_(columns + _LEAST_SQUARE, 1 - decay)
    held = [shard for shard in shards if id(shard.parameter) in parameters]
    for number in (id(shard.parameter) for shard in held if shard.parameter.dim() != 2):
        square = (gradient_of(parameters[number]) * factor).square_().add_(_LEAST_SQUARE)
        states[number]["exp_avg_sq"].lerp_(square, 1 - decay)
    # Twice, as all updates together would take as much memory as the parameters.
    sums = {
        number: _update(shard, parameters[number], states[number], factor).square_().sum()
        for shard in held
        if (number := id(shard.parameter))
    }
    sizes = _root_mean_squares(shards, sums)
    for shard in held:
        number = id(shard.parameter)
        update = _update(shard, parameters[number], states[number], factor)
        update.div_((sizes[number] / _LARGEST_RMS).clamp_min(1.0))
        parameters[number].mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])


def _update(shard: Shard, parameter: torch.Tensor, state: State, factor: float) -> torch.Tensor:
    """Return the update of a rank's range before the limit of its root mean square."""
    gradient = gradient_of(parameter) * factor
    if shard.parameter.dim() != 2:
        return gradient.mul_(state["exp_avg_sq"].rsqrt())
    part = _Part.of(shard)
    mean = state[ROWS if shard.cut != 0 else COLUMNS].mean()  # of a whole dimension
    scales = (state[ROWS][part.rows] / mean).rsqrt()[:, None] * state[COLUMNS].rsqrt()
    return gradient.mul_(part.range_of(scales).view_as(gradient))


def _means(
    shards: Sequence[Shard], parameters: dict[int, torch.Tensor], factor: float
) -> list[tuple[Shard, torch.Tensor, torch.Tensor]]:
    """Return (shard, means of the squares of rows, of columns) of every matrix."""
    matrices, sums = [shard for shard in shards if shard.parameter.dim() == 2], []
    for shard in matrices:
        rows, columns = (torch.zeros(size, device=shard.parameter.device) for size in shard.parameter.shape)
        if (parameter := parameters.get(id(shard.parameter))) is not None:
            part = _Part.of(shard)
            extended = part.extended((gradient_of(parameter) * factor).square_())
            rows[part.rows], columns = extended.sum(1), extended.sum(0)
        sums.append((rows, columns))
    _reduce([each for pair in sums for each in pair], shards[0].replicas if shards else None)
    for cut in (0, 1):
        # Sums along the dimension that tensor-parallel ranks have parts of.
        chosen = [number for number, shard in enumerate(matrices) if shard.cut == cut]
        group = matrices[chosen[0]].tensor_parallel if chosen else None
        _reduce([sums[number][1 - cut] for number in chosen], group)
    means = []
    for shard, (rows, columns) in zip(matrices, sums, strict=True):
        height, width = _whole_shape(shard)
        means.append((shard, rows / width, columns / height))
    return means


def _root_mean_squares(shards: Sequence[Shard], local: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the root mean square of every parameter's whole update, [] each, by id of the parameter. `local`: sums of
    squares of this rank's ranges."""
    sums = []
    for shard in shards:
        number = id(shard.parameter)
        sums.append(local[number] if number in local else torch.zeros((), device=shard.parameter.device))
    _reduce(sums, shards[0].replicas if shards else None)
    cut = [number for number, shard in enumerate(shards) if shard.cut is not None]
    _reduce([sums[number] for number in cut], shards[cut[0]].tensor_parallel if cut else None)
    return {
        id(shard.parameter): (total / prod(_whole_shape(shard))).sqrt()
        for shard, total in zip(shards, sums, strict=True)
    }


def _whole_shape(shard: Shard) -> list[int]:
    """Return the shape of a parameter over tensor-parallel ranks."""
    shape, cut = list(shard.parameter.shape), shard.cut
    if cut is not None:
        shape[cut] *= shard.tensor_parallel.size()
    return shape


def _reduce(tensors: list[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Sum tensors over a group in place, in one message."""
    if group is None or group.size() == 1 or not tensors:
        return
    message = torch.cat([tensor.view(-1) for tensor in tensors])
    dist.all_reduce(message, group=group)
    for tensor, values in zip(tensors, message.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(values.view_as(tensor))
