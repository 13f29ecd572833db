"""`mimo-train shards inspect` and `verify` of what is read from beginning to end: compressed tars, commands."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from data.shown import plural, shown

if TYPE_CHECKING:
    from data.index import ShardIndex
    from data.streams.shard import StreamedSample, StreamedShard


def indexes(pattern: str) -> Iterator[tuple[Any, int, "ShardIndex"]]:
    """(shard, bytes of its members so far, index of one sample), sample after sample.

    Raises:
        DataError: a shard cannot be read.
    """
    for shard in _found(pattern):
        size = 0
        with closing(_opened(shard).each()) as samples:
            for sample in samples:
                assert sample is not None, "none is passed over"
                size += sum(member.size for member in sample.index.members(0))
                yield shard, size, sample.index


def verify(pattern: str) -> int:
    """Read and decode every sample; returns the exit code."""
    from data.errors import DataError
    from data.members import named_unread
    from data.verify import check_sample

    checked = bad = broken = 0
    not_read: Counter[tuple[str, str]] = Counter()
    for shard in _found(pattern):
        opened = None
        try:
            opened = _opened(shard)
            with closing(opened.each()) as samples:
                for sample in samples:
                    assert sample is not None, "none is passed over"
                    not_read += sample.index.unread()
                    checked += 1
                    if reason := sample.bad_reason or check_sample(_Members(sample), sample.index, 0):
                        bad += 1
                        print(f"bad: {shown(str(shard))}: key {shown(sample.index.key(0))}: {shown(reason)}")
            if not opened.samples:
                print(f"warning: {shown(str(shard))}: no sample in it", file=sys.stderr)
        except DataError as error:
            broken += 1
            print(f"bad shard: {shown(str(error))}")
    for sentence in named_unread(not_read):
        print(f"warning: {sentence}", file=sys.stderr)
    print(f"{plural(checked, 'sample')} checked, {bad} bad; {plural(broken, 'shard')} cannot be read")
    return 1 if bad or broken or not checked else 0


class _Members:
    """The members of a sample that was read."""

    def __init__(self, sample: "StreamedSample") -> None:
        self._contents = sample.contents

    def read(self, path: Any, offset: int, size: int, extension: str, version: Any = None) -> bytes:
        """The member at `offset`."""
        return self._contents[offset]


def _found(pattern: str) -> list[Any]:
    from data.storage.command import Command
    from data.streams.find import find_streams
    from mimo_train.plan.stream_inputs import say_commands

    found = find_streams(pattern)
    say_commands([shard for shard in found if isinstance(shard, Command)], "the pattern")
    return found


def _opened(shard: Any) -> "StreamedShard":
    from data.bounds import BOUNDS
    from data.fields import NO_FIELDS
    from data.storage.retry import RETRIES
    from data.streams.shard import StreamedShard

    return StreamedShard(shard, BOUNDS, NO_FIELDS, 0, RETRIES)
