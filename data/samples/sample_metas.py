"""Outlines of samples: what the index says of each, as `data.outline` describes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from data.index.shard_index import Member, ShardIndex
from data.media.options import Bounds
from data.records.members import NO_FIELDS, unread
from data.records.record_checks import NO_OTHER_MEMBERS, OtherMembers
from data.samples.frames import Sampling, pictures_of
from data.samples.sample_meta import Media, SampleOutline, count_tokens
from data.text_format import SampleKey, shown


class Outlines:
    """Makes the outlines of a dataset's samples; arguments as of `data.dataset.Dataset`."""

    def __init__(self, modules: Sequence[Media], sequence_length: int, bounds: Bounds, sampling: Sampling) -> None:
        self._modules, self._sequence_length = modules, sequence_length
        self._bounds, self._sampling = bounds, sampling
        self._kinds = list(dict.fromkeys(media.kind for media in modules))

    def of(self, index: ShardIndex, shard: int, row: int, number: int, bad_reason: str | None = None) -> SampleOutline:
        """That of a row of a shard.

        Args:
            shard: its number; number: of the sample, -1 where it has none; bad_reason: beside what the index says.
        """
        key, reason, at = SampleKey(partial(index.key, row)), bad_reason or index.bad_reason(row), index.record(row)
        every = index.members(row)
        members = {kind: self._read_of(kind, every) for kind in self._kinds}
        tokens: dict[str, list[int]] = {}
        record = () if at is None else (every[at],)
        if reason is None and record and (above := self._bounds.of_record(record[0].size)):
            reason = f"member .{shown(record[0].extension)}: {above}"
        # Of several texts the others' bounds show when they are read.
        texts = tuple(member for member in every if member.extension in index.fields.members) or record
        if reason is None:
            tokens, reason = count_tokens(members, self._modules, self._sequence_length, self._bounds)
        if reason is not None:
            members, tokens = {kind: [] for kind in self._kinds}, {media.module: [] for media in self._modules}
        beside = NO_OTHER_MEMBERS
        if reason is None and len(every) > len(texts):
            beside = _beside(index, every)
        return SampleOutline(number, shard, key, texts, members, tokens, reason, beside, index.fields)

    def _read_of(self, kind: str, members: Iterable[Member]) -> list[Member]:
        """Those that modules of this kind read."""
        if kind == "image":
            return pictures_of(members, self._sampling)
        return [member for member in members if member.kind == kind]


def _beside(index: ShardIndex, members: Sequence[Member]) -> OtherMembers:
    """What is beside the record; of what is not read, where `data.fields` says nothing about it."""
    names: dict[str, list[str]] = {}
    for member in members:
        names.setdefault(member.kind, []).append(member.extension)
    extensions = [member.extension for member in members]
    return OtherMembers(names, [] if index.fields != NO_FIELDS else [name for name, _ in unread(extensions)])
