"""Pictures, videos and clips that are in held-out samples and in those that are trained on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from xxhash import xxh3_128_digest

from data.index.shard_index import Member
from data.order.sources import MixedOrder
from data.samples.dataset import Dataset

_MOST_READ = 1000  # members of training samples; of other bytes are few that are as large in bytes and pixels


class Shared(NamedTuple):
    """What held-out samples have in common with those that are trained on."""

    samples: int
    """Held-out samples with a medium that is in a training sample, byte for byte."""
    of: int
    """Held-out samples that were looked at."""
    is_whole: bool
    """Whether every training sample was compared."""


def shared_media(trained: Dataset, held_out: Dataset, first: int) -> Shared:
    """How many of the first samples that are held out have a medium of a training sample.

    Sizes are compared by the indexes alone; what has the same size in bytes and the same extent is read.

    Raises:
        ShardError, ReadError: a member cannot be read.
    """
    first = min(first, len(held_out))
    of_size: dict[tuple[int, int, int], list[tuple[int, int, Member]]] = {}
    for number in range(first):
        outline = held_out.outline(number)
        for members in outline.members.values():
            for member in members:
                if member.frame is None or member.frame.number == 0:
                    of_size.setdefault(_size(member), []).append((number, outline.shard, member))
    wanted = _mixed(*np.array([*of_size], dtype=np.uint64).reshape(-1, 3).T)
    shared: set[int] = set()
    digests: dict[tuple[int, int], bytes] = {}
    read, begin = 0, 0
    for shard in range(len(trained.shards)) if of_size else ():
        index, end = trained.index(shard), begin + trained.samples_of(shard)
        columns = (index.all_members[name].astype(np.uint64) for name in ("size", "first", "second"))
        alike = np.flatnonzero(np.isin(_mixed(*columns), wanted))
        rows = np.searchsorted(index.samples["first_member"], alike, side="right") - 1
        for row in np.unique(rows[_are_trained(trained, begin + rows)]).tolist():
            for member in index.members(row):
                own = [one for one in of_size.get(_size(member), ()) if one[0] not in shared]
                if not own:
                    continue
                if read == _MOST_READ:
                    return Shared(len(shared), first, False)
                read += 1
                content = _digest(trained, shard, member)
                for number, at, other in own:
                    if (at, other.offset) not in digests:
                        digests[at, other.offset] = _digest(held_out, at, other)
                    if digests[at, other.offset] == content:
                        shared.add(number)
        begin = end
    return Shared(len(shared), first, True)


def _size(member: Member) -> tuple[int, int, int]:
    """As `data.index.MEMBER` has it."""
    if member.kind == "video":
        return member.size, member.height << 32 | member.width, member.milliseconds
    return (member.size, *member.extent)


def _mixed(size: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """A number for each; equal ones are looked at again."""
    return size * np.uint64(0x9E3779B97F4A7C15) ^ first * np.uint64(0xBF58476D1CE4E5B9) ^ second


def _are_trained(trained: Dataset, rows: np.ndarray) -> np.ndarray:
    """Whether rows of all shards are trained on."""
    if not isinstance(trained.order, MixedOrder):
        return np.ones(len(rows), dtype=bool)
    held = [part.first + part.held for part in trained.order.parts if part.held is not None]
    return ~np.isin(rows, np.concatenate(held)) if held else np.ones(len(rows), dtype=bool)


def _digest(dataset: Dataset, shard: int, member: Member) -> bytes:
    place, version = dataset.shards[shard], dataset.version(shard)
    return xxh3_128_digest(dataset.reader.read(place, member.offset, member.size, member.extension, version))
