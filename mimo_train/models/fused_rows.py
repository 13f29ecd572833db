"""Rows of a fused weight by projection: taken apart, and put together again."""

from collections.abc import Iterable, Mapping

import torch

from mimo_train.layout.adapters import WHOLE, Linear


class FusedRows:
    """The rows that one tensor-parallel rank has of a linear layer's weight, or of anything with a number for each row.

    Of queries, keys and values a rank has whole groups; of gate and up a part of each. Of either, the rows of one
    projection are one contiguous part of the whole projection's.

    Attributes:
        interleaved: whether a rank's rows are no contiguous part of the whole weight's.
    """

    def __init__(self, linear: Linear, tp: int = 1):
        """`tp`: ranks that the rows are cut over; a row-parallel layer has all of them on each."""
        tp = tp if linear.column else 1
        dealt, shares = (tp, 1) if linear.cut_groups else (1, tp)
        assert linear.groups % dealt == 0, f"{linear.groups} groups of {linear.name} over tp {tp}"
        self._groups = linear.groups // dealt
        self._sizes = {name: rows // shares for name, rows in linear.projections}
        self.interleaved = linear.fused and not linear.cut_groups

    def count(self, projection: str = WHOLE) -> int:
        """Rows of one projection on this rank, or all."""
        return self._groups * sum(size for name, size in self._sizes.items() if projection in (WHOLE, name))

    def split(self, rows: torch.Tensor, projections: Iterable[str]) -> dict[str, torch.Tensor]:
        """Rows along dimension 0 -> those of each of `projections`, in its own order."""
        wanted = list(projections)
        if WHOLE in wanted:
            return {WHOLE: rows}
        pieces = rows.unflatten(0, (self._groups, -1)).split(list(self._sizes.values()), dim=1)
        of = dict(zip(self._sizes, pieces, strict=True))
        return {name: of[name].flatten(0, 1) for name in wanted}

    def join(self, pieces: Mapping[str, torch.Tensor], dim: int, fill: float) -> torch.Tensor:
        """What each projection has along `dim` -> all rows, `fill` for projections that are not there."""
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
