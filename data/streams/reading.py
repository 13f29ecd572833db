"""Reading ahead: a thread that reads the endless sequence of samples, up to what a step needs and somewhat further."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing

from data.errors import DataError, ShardError
from data.shown import plural
from data.storage.streams import Origin
from data.streams.order import StreamOrder
from data.streams.shard import StreamedSample, StreamedShard
from data.waiting import LOOK_SECONDS, GivesUp, Wait, never

AHEAD_BYTES = 64 << 20
"""Of samples that nobody has asked for yet."""
_PATIENCE = 5.0  # seconds that the end of the thread is waited for


class Reading:
    """The samples from number `start` on, one after the other.

    Args:
        shards: of an epoch, by their numbers; order: of them.
        counts: (samples, their digest) of each shard that was read to its end, by its number: known ones are passed
            over unread, others are added.
        open_shard: (number of the shard, samples to pass over) -> its samples.
    """

    def __init__(
        self,
        shards: Sequence[Origin],
        order: StreamOrder,
        counts: dict[int, tuple[int, int]],
        open_shard: Callable[[int, int], StreamedShard],
        start: int,
    ) -> None:
        self._shards, self._order, self._counts, self._open = shards, order, counts, open_shard
        self._start = start
        self._wanted = start
        """Samples below this number have been asked for."""
        self._ahead: deque[tuple[int, StreamedSample]] = deque()
        self._bytes = 0
        self._failed: BaseException | None = None
        self._closed = False
        self._current: StreamedShard | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self._thread.start()

    def take(self, end: int, gives_up: GivesUp = never) -> list[tuple[int, StreamedSample]]:
        """The next samples, up to number `end`.

        Raises what went wrong in the thread, DataError once it is closed, WaitGivenUp where `gives_up` says so while
        this waits: then nothing more can be taken.
        """
        taken: list[tuple[int, StreamedSample]] = []
        wait = Wait(gives_up)
        with self._changed:
            self._wanted = end
            self._changed.notify_all()
            while len(taken) < end - self._start:
                if self._ahead:
                    number, sample = self._ahead.popleft()
                    self._bytes -= _size(sample)
                    taken.append((number, sample))
                    self._changed.notify_all()
                elif self._failed is not None:
                    raise self._failed
                elif self._closed:
                    raise DataError("data.shards: reading has been ended")
                else:
                    wait.look()
                    self._changed.wait(LOOK_SECONDS)
        self._start = end
        return taken

    def close(self) -> None:
        """End the thread, and the command that it reads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            current = self._current
        if current is not None:
            current.stop()
        self._thread.join(_PATIENCE)

    def _run(self) -> None:
        try:
            self._read()
        except BaseException as error:
            with self._changed:
                self._failed = error
                self._changed.notify_all()

    def _read(self) -> None:
        start, number, epoch = self._start, 0, 0
        while True:
            first = number
            for shard in self._order.shards(epoch):
                known, _ = self._counts.get(shard, (None, 0))
                if known is not None and number + known <= start:
                    number += known
                    continue
                number += self._read_shard(shard, number, max(start - number, 0))
                if self._closed:
                    return
            size, epoch = number - first, epoch + 1
            if not size:
                shards = plural(len(self._shards), "shard")
                raise DataError(f"data.shards: no sample in {shards}, for example {self._shards[0]}")
            self._order.epoch_size = size
            passed = max(start - number, 0) // size  # whole epochs
            number, epoch = number + passed * size, epoch + passed

    def _read_shard(self, shard: int, number: int, skip: int) -> int:
        """How many samples it has; the first of them has this number."""
        self._order.begin(number, shard)
        opened = self._open(shard, skip)
        with self._changed:
            self._current = opened
            if self._closed:  # while it was opened, so that nobody has stopped it
                opened.stop()
        with closing(opened.each()) as samples:
            for at, sample in enumerate(samples):
                if self._closed:
                    return opened.samples
                if sample is not None:
                    self._put(number + at, sample)
        found = opened.samples, opened.digest
        if self._counts.setdefault(shard, found) != found:
            had, _ = self._counts[shard]
            what = "as many, of other names or sizes," if had == found[0] else had
            raise ShardError(
                f"{self._shards[shard]}: has {plural(found[0], 'sample')}, and had {what} when it was read before: a "
                "run continues, and every rank has the same samples, only where a shard is the same each time"
            )
        return opened.samples

    def _put(self, number: int, sample: StreamedSample) -> None:
        with self._changed:
            while number >= self._wanted and self._bytes > AHEAD_BYTES and not self._closed:
                self._changed.wait()
            self._ahead.append((number, sample))
            self._bytes += _size(sample)
            self._changed.notify_all()


_OUTLINE = 4096  # bytes that a sample takes beside its members, about


def _size(sample: StreamedSample) -> int:
    return _OUTLINE + sum(map(len, sample.contents.values()))
