"""Rows of fused linear layers on one tensor-parallel rank."""

from collections.abc import Iterable, Mapping

import torch

from mimo_train.models.blocks.base import WHOLE, Linear


class FusedRows:
    """The rows of a linear layer's weight on one tensor-parallel rank, or of anything with a number for each row.

    A rank has whole groups of queries, keys and values, and a part of gate and of up.
    """

    def __init__(self, linear: Linear, tp: int = 1):
        """`tp`: ranks that the rows are cut over; a row-parallel layer has all of them on each."""
        tp = tp if linear.column else 1
        dealt, shares = (tp, 1) if linear.cut_groups else (1, tp)
        assert linear.groups % dealt == 0, f"{linear.groups} groups of {linear.name} over tp {tp}"
        self._groups = linear.groups // dealt
        self._sizes = {name: rows // shares for name, rows in linear.projections}

    def count(self, projection: str = WHOLE) -> int:
        """Return the number of rows of one projection on this rank, or of all."""
        return self._groups * sum(size for name, size in self._sizes.items() if projection in (WHOLE, name))

    def split(self, rows: torch.Tensor, projections: Iterable[str]) -> dict[str, torch.Tensor]:
        """Split rows along dimension 0 into those of each of `projections`, in its own order."""
        wanted = list(projections)
        if WHOLE in wanted:
            return {WHOLE: rows}
        pieces = rows.unflatten(0, (self._groups, -1)).split(list(self._sizes.values()), dim=1)
        by_name = dict(zip(self._sizes, pieces, strict=True))
        return {name: by_name[name].flatten(0, 1) for name in wanted}

    def join(self, pieces: Mapping[str, torch.Tensor], dim: int, fill: float) -> torch.Tensor:
        """Join the pieces of projections along `dim` to all rows, with `fill` for missing projections."""
        if WHOLE in pieces:
            return pieces[WHOLE]
        like = next(iter(pieces.values()))
        dim %= like.dim()
        grouped = []
        for name, size in self._sizes.items():
            if name in pieces:
                grouped.append(pieces[name].unflatten(dim, (self._groups, size)))
            else:
                shape = (*like.shape[:dim], self._groups, size, *like.shape[dim + 1 :])
                grouped.append(like.new_full(shape, fill))
        return torch.cat(grouped, dim=dim + 1).flatten(dim, dim + 1)
