"""The global order: sample number -> (epoch, position) -> row of the dataset, without state.

Sample number n has epoch n // N and position n % N, for N rows. The row is a keyed permutation of the position.

With b = bit length of N - 1, an unbalanced Feistel network permutes the integers below 2**b. The high part has b // 2
bits. In each of 12 rounds one part is XORed with a keyed hash of the other, in turns; each round is its own inverse.
The hash is SplitMix64's finaliser (Steele, Lea, Flood 2014), as are the round keys, from (seed, epoch, round). Results
of N or more are permuted again until they are below N (cycle walking, Black and Rogaway 2002). Since 2**b < 2 N, it
takes fewer than two walks on average.

With blocks, blocks are permuted. The dataset's last block may be shorter; the inverse permutation gives its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

_MASK = (1 << 64) - 1
_ROUNDS = 12
_FEW = 64
"""Up to this many numbers, single look-ups are faster than vectorized ones."""


@dataclass(frozen=True)
class GlobalOrder:
    """Order of a dataset of `size` rows, in blocks of `block` rows. `shuffle=False` is the identity."""

    size: int
    seed: int = 0
    shuffle: bool = True
    block: int = 1
    _keys: Callable[[int], tuple[int, ...]] = field(init=False, repr=False, compare=False)
    _place_of_last: Callable[[int], int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert self.size > 0 and self.block > 0, (self.size, self.block)
        object.__setattr__(self, "_keys", lru_cache(maxsize=4)(lambda epoch: _round_keys(self.seed, epoch)))
        last = lru_cache(maxsize=4)(lambda epoch: _place(self._blocks - 1, self._blocks, self._keys(epoch)))
        object.__setattr__(self, "_place_of_last", last)

    def row(self, number: int) -> int:
        """Return the dataset row of sample `number` (>= 0)."""
        assert number >= 0, number
        if self.block > 1:
            return int(self.rows(np.asarray([number]))[0])
        epoch, value = divmod(number, self.size)
        if not self.shuffle or self.size == 1:
            return value
        keys = self._keys(epoch)
        low_bits, low_mask, high_mask = _split(self.size)
        while True:
            high, low = value >> low_bits, value & low_mask
            for turn in range(0, _ROUNDS, 2):
                high ^= splitmix(low + keys[turn]) & high_mask
                low ^= splitmix(high + keys[turn + 1]) & low_mask
            value = high << low_bits | low
            if value < self.size:
                return value

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """Return `row` of each of `numbers`, int64 [numbers]."""
        if self.block == 1 and len(numbers) <= _FEW:
            return np.array([self.row(number) for number in numbers.tolist()], dtype=np.int64)
        epochs, values = np.divmod(np.asarray(numbers, dtype=np.int64), self.size)
        if not self.shuffle or self.size == 1:
            return values
        rows = np.empty_like(values)
        for epoch in np.unique(epochs).tolist():
            of_epoch = epochs == epoch
            if self.block > 1:
                rows[of_epoch] = self._in_blocks(values[of_epoch], epoch)
            else:
                rows[of_epoch] = _permuted(values[of_epoch].astype(np.uint64), self.size, self._keys(epoch))
        return rows

    @property
    def _blocks(self) -> int:
        return -(-self.size // self.block)

    def _in_blocks(self, positions: np.ndarray, epoch: int) -> np.ndarray:
        missing = self._blocks * self.block - self.size  # rows that the last block lacks
        end = (self._place_of_last(epoch) + 1) * self.block - missing  # of the last block's positions
        places, within = np.divmod(positions + missing * (positions >= end), self.block)
        return self.block * _permuted(places.astype(np.uint64), self._blocks, self._keys(epoch)) + within


def _permuted(values: np.ndarray, size: int, keys: tuple[int, ...]) -> np.ndarray:
    """The loop of `GlobalOrder.row` on uint64, whose products wrap around as its masks do. Returns int64."""
    low_bits, low_mask, high_mask = map(np.uint64, _split(size))
    walking = np.arange(len(values)) if size > 1 else np.arange(0)
    while len(walking):
        current = values[walking]
        high, low = current >> low_bits, current & low_mask
        for turn in range(0, _ROUNDS, 2):
            high ^= splitmix_all(low + np.uint64(keys[turn])) & high_mask
            low ^= splitmix_all(high + np.uint64(keys[turn + 1])) & low_mask
        current = high << low_bits | low
        values[walking] = current
        walking = walking[current >= np.uint64(size)]
    return values.astype(np.int64)


def _place(value: int, size: int, keys: tuple[int, ...]) -> int:
    """Return the inverse of `_permuted` for a value: the same rounds in reverse."""
    low_bits, low_mask, high_mask = _split(size)
    while size > 1:
        high, low = value >> low_bits, value & low_mask
        for turn in range(_ROUNDS - 2, -1, -2):
            low ^= splitmix(high + keys[turn + 1]) & low_mask
            high ^= splitmix(low + keys[turn]) & high_mask
        value = high << low_bits | low
        if value < size:
            break
    return value


def _split(size: int) -> tuple[int, int, int]:
    """Return (bits of the low part, its mask, mask of the high part)."""
    bits = (size - 1).bit_length()
    high_bits = bits // 2
    return bits - high_bits, (1 << bits - high_bits) - 1, (1 << high_bits) - 1


def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    state = splitmix(splitmix(seed & _MASK) + epoch)
    return tuple(splitmix(state + 0x9E3779B97F4A7C15 * (turn + 1)) for turn in range(_ROUNDS))


def splitmix(value: int) -> int:
    """Return the finaliser of SplitMix64."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def splitmix_all(values: np.ndarray) -> np.ndarray:
    """Return `splitmix` of uint64 values."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
