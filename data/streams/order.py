"""The order of streams: each epoch has the shards in an order of its own, and in each its samples as they come.

Where shards begin is known as far as they have been read; all that is asked of this is about samples that were.
"""

from __future__ import annotations

from bisect import bisect_right

from data.errors import DataError
from data.order import GlobalOrder

_ROWS = 1 << 40  # of a shard, at most


class StreamOrder:
    """As `GlobalOrder`, of samples that nobody has counted.

    Args:
        shards: their number; seed, shuffle: of their order.
    """

    def __init__(self, shards: int, seed: int, shuffle: bool) -> None:
        self._number, self._shards = shards, GlobalOrder(shards, seed, shuffle)
        self._starts: list[int] = []
        self._of: list[int] = []
        self.epoch_size: int | None = None
        """Samples of an epoch; None until one has been read or passed over."""

    def shards(self, epoch: int) -> list[int]:
        """Numbers of the shards, in the order of an epoch."""
        return [self._shards.row(epoch * self._number + at) for at in range(self._number)]

    def begin(self, number: int, shard: int) -> None:
        """A shard's first sample has this number, and those behind it the following ones."""
        while self._starts and self._starts[-1] >= number:  # an empty shard, or reading that has begun again
            self._starts.pop()
            self._of.pop()
        # In this order: other threads ask meanwhile.
        self._of.append(shard)
        self._starts.append(number)

    def row(self, number: int) -> int:
        """A number of a sample that is the same in every epoch, of one that has been read."""
        at = bisect_right(self._starts, number) - 1
        assert at >= 0, f"sample {number} was not read"
        return self._of[at] * _ROWS + number - self._starts[at]

    def place(self, number: int) -> tuple[int, int]:
        """(shard, row in it) of a sample that has been read."""
        return divmod(self.row(number), _ROWS)

    @property
    def size(self) -> int:
        """Raises DataError: nobody knows."""
        raise DataError("data.stream: how many samples a stream has is not known before it was read")
