"""One shard from its beginning to its end: samples with their members' bytes, in the order of the tar.

Not WebDataset's own reader: where a header is damaged, or a tar ends at a member's end, that one goes on with the next
shard without a word, and samples are missing. Headers are read as those of shards that are indexed
(`data.storage.tar`), and so are keys.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64

from data.bounds import Bounds
from data.errors import DataError, ShardError
from data.fields import Fields
from data.index import IndexBuilder, ShardIndex, grouped, measure
from data.shown import shown
from data.storage.command import Command
from data.storage.streams import Origin, Stream
from data.storage.tar import truncated, walk_tar
from data.storage.version import ShardVersion

_HEADER = 512  # bytes of a member beside its content
_MOST_MEMBERS = 1 << 16


@dataclass(frozen=True)
class StreamedSample:
    """A sample as it was read."""

    index: ShardIndex
    """Of this sample alone: row 0."""
    contents: dict[int, bytes]
    """Bytes of its members by their offset; none where it is bad."""
    bad_reason: str | None
    """Why it is, beside what the index says."""
    digest: int = 0
    """Of its key and its members' names, sizes and bytes, 64 bits."""


class StreamedShard:
    """The samples of a shard, once.

    Args:
        fields: `data.fields`.
        skip: samples at its beginning that are passed over: None is given in their place.
        retries: see `Stream`.

    Attributes:
        samples: how many have been given or passed over.
        digest: of names and sizes of all members so far, those of samples that were passed over too.
    """

    def __init__(self, place: Origin, bounds: Bounds, fields: Fields, skip: int, retries: int) -> None:
        self._place, self._bounds, self._fields, self._skip = place, bounds, fields, skip
        self.samples = 0
        self._stream = Stream(place, retries)
        self._row, self._key, self._bytes, self._members = -1, "", 0, 0
        self._digest = xxh3_64()
        self._said = Path(str(place)) if isinstance(place, Command) else place

    @property
    def digest(self) -> int:
        return self._digest.intdigest()

    def each(self) -> Generator[StreamedSample | None]:
        """The samples, once.

        Raises:
            ShardError: the shard is no tar, damaged, cut off, or its command failed; with the number of the sample.
            ReadError: it cannot be read.
        """
        try:
            for key, names, members in grouped(walk_tar(self._place, self._stream.read, None), self._take):
                yield None if self.samples < self._skip else self._sample(key, names, members)
                self.samples += 1
        except DataError as error:
            raise type(error)(f"{error} (in sample {self.samples} of the shard, counted from 0)") from error
        finally:
            self._stream.close()

    def stop(self) -> None:
        """Let a read that another thread waits for end."""
        self._stream.stop()

    def _take(self, key: str, extension: str, offset: int, size: int) -> tuple[tuple[int, int, int, int], bytes | None]:
        """(place and extent of a member, its content if it is read)."""
        if self._row < 0 or key != self._key:
            self._row, self._key, self._bytes, self._members = self._row + 1, key, 0, 0
        self._bytes, self._members = self._bytes + _HEADER + size, self._members + 1
        self._digest.update(f"{key}.{extension} {size}\n".encode(errors="surrogateescape"))
        if self._members > _MOST_MEMBERS:
            raise ShardError(f"{self._place}: the key {shown(key)!r} has more than {_MOST_MEMBERS} members")
        if self._row < self._skip or self._bounds.of_sample(self._bytes):
            return (offset, size, 0, 0), None
        content = self._stream.read(size, offset)
        if len(content) < size:
            raise truncated(self._place, f"{key}.{extension}", offset + len(content), size - len(content))

        def read(length: int, at: int) -> bytes:
            return content[at - offset : at - offset + length]

        return (offset, size, *measure(read, extension, offset, size)), content

    def _sample(
        self, key: str, names: list[str], members: list[tuple[tuple[int, int, int, int], bytes | None]]
    ) -> StreamedSample:
        builder = IndexBuilder()
        builder.add(key, names, [place for place, _ in members])
        index = builder.index(self._said, ShardVersion(0, 0, 0, "")).with_fields(self._fields)
        digest = xxh3_64(repr((key, names)).encode())
        for (_, size, *_), content in members:
            digest.update(f" {size} ".encode())
            digest.update(content or b"")
        total = sum(_HEADER + size for (_, size, *_), _ in members)
        if reason := self._bounds.of_sample(total):
            return StreamedSample(index, {}, reason, digest.intdigest())
        contents = {place[0]: content for place, content in members if content is not None}
        return StreamedSample(index, contents, None, digest.intdigest())
