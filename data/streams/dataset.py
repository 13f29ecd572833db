"""Samples of shards that are read from beginning to end: every rank reads all of them, in the same order, and keeps
what it needs.

The samples of a step follow from its number alone, whatever the layout: the shards of an epoch are in the order of
`StreamOrder`, the samples of a shard in their own. A run that continues passes over the samples before, which are read
once for that: shards that were counted meanwhile are passed over unread. What the plan of a step needs (the sizes of
its media) comes from the samples themselves, which is why every rank reads them.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from xxhash import xxh3_64, xxh3_128

from data.bad_samples import BadSamples, allowed_of
from data.bounds import BOUNDS, Bounds
from data.errors import ShardError
from data.fields import NO_FIELDS, Fields
from data.frames import SAMPLING, Sampling
from data.index import Member
from data.media.ground import WHITE, Colour
from data.outline import Media, SampleOutline
from data.outlined import OutlinedSamples
from data.sample_table import StepSamples
from data.sources import Source
from data.step import LANGUAGE
from data.storage.retry import RETRIES
from data.storage.streams import Origin, version_of
from data.streams.find import find_streams
from data.streams.order import StreamOrder
from data.streams.reading import Reading
from data.streams.shard import StreamedSample, StreamedShard
from data.tokens import Tokenizer

_STEPS = 8
"""Of the steps that were planned last the samples are held: more than a loader reads ahead and a run looks back."""


@dataclass
class _Held:
    """A sample in memory."""

    outline: SampleOutline
    contents: dict[int, bytes]
    identity: str
    is_cut: bool = False
    """Whether members that this rank does not read have been dropped."""


class StreamDataset(OutlinedSamples):
    """An endless stream of samples, addressed by number, of which those of the latest steps are held.

    source: see `find_streams`; other arguments as of `data.dataset.Dataset`. Samples are read by `plan_step`, in steps
    that follow one another; other numbers than those of the latest steps begin anew, from the first sample on.

    Raises DataError (nothing is named so), ShardError (a file cannot be opened).
    """

    order: StreamOrder
    is_at_hand = False

    def __init__(
        self,
        source: Source,
        *,
        tokenizer: Tokenizer,
        sequence_length: int,
        media: Sequence[Media] = (),
        seed: int = 0,
        shuffle: bool = True,
        blind: bool = False,
        max_bad_samples: int = 0,
        read_retries: int = RETRIES,
        bounds: Bounds = BOUNDS,
        ground: Colour | None = WHITE,
        fields: Fields = NO_FIELDS,
        sampling: Sampling = SAMPLING,
        skip_null: bool = False,
    ) -> None:
        super().__init__(tokenizer, sequence_length, media, blind, False, bounds, ground, skip_null, sampling)
        self.sources, self.shards = (source,), find_streams(source.shards)
        self._own_fields, self._read_retries = fields, read_retries
        self.order = StreamOrder(len(self.shards), seed, shuffle)
        self.allowed_bad_samples = allowed_of(max_bad_samples, 0)
        self.bad_samples = BadSamples(self.allowed_bad_samples, lambda number: self.order.row(number))
        self._versions = [version_of(shard, read_retries) for shard in self.shards]
        known = [(shard.name, *version) for shard, version in zip(self.shards, self._versions, strict=True)]
        self.fingerprint = hashlib.sha256(json.dumps(["stream", known]).encode()).hexdigest()[:32]
        """Of the shards' names, of files also sizes and contents (some blocks of each), of objects sizes."""
        self._counts: dict[int, tuple[int, int]] = {}
        self._held: dict[int, _Held] = {}
        self._steps: deque[tuple[int, int]] = deque()
        self._reading: Reading | None = None
        self._next = 0
        self._digest = xxh3_64()
        self._lock = threading.Lock()

    @property
    def source_sizes(self) -> list[int]:
        """None: nobody knows."""
        return []

    def locate(self, number: int) -> tuple[Origin, str]:
        """(shard, key) of a sample of the latest steps; of an earlier one "sample 12", its place in the shard."""
        shard, row = self.order.place(number)
        held = self._held.get(number)
        return self.shards[shard], f"sample {row}" if held is None else str(held.outline.key)

    def identity(self, number: int) -> str:
        """A hash of its media's bytes and names."""
        return self._held_of(number).identity

    def plan_step(self, first: int, size: int) -> StepSamples:
        """Reads the samples [first, first + size), and gives what their headers say. Raises WaitGivenUp, behind which
        nothing but `close` may follow, and what reading raises."""
        with self._lock:
            self._read_to(first, size)
            digest = self._digest.intdigest()
        outlines = [self._held[number].outline for number in range(first, first + size)]
        sizes = {media.module: [outline.media_size(media) for outline in outlines] for media in self.modules}
        tokens, loads, pairs = (
            {module: np.array([each[at] for each in found], dtype=np.int64) for module, found in sizes.items()}
            for at in range(3)
        )
        return StepSamples(tokens, loads, pairs, None, digest=digest)

    def will_read(self, own: Sequence[Mapping[str, Sequence[int]]]) -> None:
        """Drop the members of the step that was planned last which this rank does not read."""
        first, size = self._steps[-1]
        wanted: dict[int, set[int]] = {}
        for of_microbatch in own:
            for module, numbers in of_microbatch.items():
                for number in numbers:
                    outline = self._held_of(number).outline
                    members = outline.texts if module == LANGUAGE else outline.members[self._by_module[module].kind]
                    wanted.setdefault(number, set()).update(member.offset for member in members)
        for number in range(first, first + size):
            held, kept = self._held[number], wanted.get(number, ())
            held.contents = {offset: content for offset, content in held.contents.items() if offset in kept}
            held.is_cut = True

    def epoch_end(self, read: int) -> int:
        """How many of the first `read` samples, which have been read, are of the first epoch."""
        return read if self.order.epoch_size is None else min(read, self.order.epoch_size)

    def first_epoch(self) -> Iterator[range]:
        """The samples of the first epoch, each held when its turn comes: their numbers, one by one."""
        number = 0
        while True:
            self.plan_step(number, 1)  # not more at once: what stands before damage is given
            if number == self.order.epoch_size:
                return
            yield range(number, number + 1)
            number += 1

    def outline(self, number: int) -> SampleOutline:
        """What is known of a sample of the latest steps."""
        return self._held_of(number).outline

    def close(self) -> None:
        """Ends reading: threads, files and commands, and `plan_step` in another thread that waits for them."""
        reading = self._reading
        if reading is not None:
            reading.close()
        with self._lock:
            if self._reading is not None and self._reading is not reading:  # begun meanwhile
                self._reading.close()
            self._reading = None

    def _read_to(self, first: int, size: int) -> None:
        end = first + size
        held = (self._held.get(at) for at in range(first, end))
        if self._reading is None or (first != self._next and not all(one and not one.is_cut for one in held)):
            if self._reading is not None:
                self._reading.close()
            self._held.clear()
            self._steps.clear()
            self._next = first
            self._reading = Reading(self.shards, self.order, self._counts, self._open, first)
        for number, sample in self._reading.take(end, self.gives_up) if end > self._next else ():
            self._held[number] = self._held_as(number, sample)
            self._digest.update(sample.digest.to_bytes(8, "little"))
        self._next = max(self._next, end)
        self._steps.append((first, size))
        while len(self._steps) > _STEPS:
            gone, count = self._steps.popleft()
            for number in range(gone, gone + count):
                if not any(begin <= number < begin + length for begin, length in self._steps):
                    self._held.pop(number, None)

    def _open(self, shard: int, skip: int) -> StreamedShard:
        place = self.shards[shard]
        if isinstance(place, Path) and version_of(place, self._read_retries) != self._versions[shard]:
            raise ShardError(
                f"{place}: is not the file that it was when the run started. Start again when it is whole."
            )
        return StreamedShard(self.shards[shard], self._bounds, self._own_fields, skip, self._read_retries)

    def _held_as(self, number: int, sample: StreamedSample) -> _Held:
        shard, _ = self.order.place(number)
        outline = self._outlines.of(sample.index, shard, 0, number, sample.bad_reason)
        members = [*outline.texts, *(member for of_kind in outline.members.values() for member in of_kind)]
        kept = {member.offset for member in members} if outline.bad_reason is None else ()
        contents = {offset: content for offset, content in sample.contents.items() if offset in kept}
        return _Held(outline, contents, _identity(outline, contents))

    def _held_of(self, number: int) -> _Held:
        held = self._held.get(number)
        assert held is not None, f"sample {number} is of none of the steps that were planned last"
        return held

    def _read(self, outline: SampleOutline, member: Member) -> bytes:
        return self._held_of(outline.number).contents[member.offset]

    def _source_name(self, shard: int) -> str:
        return self.sources[0].name


def _identity(outline: SampleOutline, contents: Mapping[int, bytes]) -> str:
    """See `StreamDataset.identity`."""
    digest = xxh3_128()
    for kind, members in sorted(outline.members.items() if contents else ()):
        for offset in dict.fromkeys(member.offset for member in members):
            digest.update(f"{kind} {len(contents[offset])} ".encode())
            digest.update(contents[offset])
    return digest.hexdigest()
