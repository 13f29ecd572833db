"""Sample metadata from the index, without reading a member: the same numbers on every rank.

`SampleTable.one` describes one sample for reading, `SampleTable.step` a step's samples for planning.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

from data.errors import DataError, RecordError, reason_of
from data.index.shard_index import Member, Rows, ShardIndex, unpack_video
from data.media.options import Bounds
from data.media.video_packets import milliseconds_of
from data.order.load_balance import MediaItems
from data.order.order import splitmix
from data.order.packing import whole_work
from data.order.step import StepSamples
from data.records.conversation import Conversation, Visual
from data.records.members import NO_FIELDS, Fields, arrange, unread, why_unreadable
from data.records.record_checks import NO_OTHER_MEMBERS, OtherMembers
from data.samples.media_spec import SAMPLING, Media, Sampling, audio_of, images_of, is_video, places_of
from data.text.placeholders import ItemText, Place
from data.text.templates import MediaTokens
from data.text_format import SampleKey, shown

_VIDEO = -2  # kind of a video among the images
_PROBES, _RATES = 160, (8000, 16000, 22050, 24000, 32000, 44100, 48000)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_LENGTHS_VERSION = 12
"""Raise it if the same texts get other lengths."""

Input = tuple[Member, tuple[int, ...], list[int]]
Measured = tuple[tuple[int, int, int, int], ...]
"""(sequence tokens, tokens inside the encoder, pairs of these that attend to each other, equal parts) of an item, for
each module of its kind."""


@dataclass(frozen=True)
class SampleMeta:
    """A sample's index data. One with a `bad_reason` has no members and no tokens."""

    number: int
    shard: int
    row: int
    key: SampleKey
    texts: tuple[Member, ...]  # the record; several if `data.fields` names several
    members: dict[str, list[Member]]  # of the run's kinds, in shard order; see `images_of`
    tokens: dict[str, list[int]]  # module -> sequence tokens of each of its items
    bad_reason: str | None
    others: OtherMembers = NO_OTHER_MEMBERS
    fields: Fields = NO_FIELDS

    @property
    def visuals(self) -> tuple[Visual, ...]:
        """The images and videos, in shard order."""
        return places_of(self.members.get("image", ()))

    @property
    def counts(self) -> dict[str, int]:
        """Kind -> number of images, videos and audio items, for the run's kinds."""
        counts = {kind: sum(not member.is_sound for member in members) for kind, members in self.members.items()}
        if "image" in counts:
            visuals = self.visuals
            counts["video"] = sum(visual.kind == "video" for visual in visuals)
            counts["image"] = len(visuals) - counts["video"]
        return counts

    def extents(self, media: Media) -> list[tuple[int, ...]]:
        """Return `Media.extents` of the module's items."""
        return media.extents([extent_of(member) for member in self.members[media.kind]])

    def inputs(self, media: Media, items: Collection[int] | None = None) -> list[Input]:
        """Return the members of the module's kind, their `extents` and the numbers of their parts; only those of
        `items` (`MediaItems.numbers`), if given. The frames of a video are parts of one member."""
        wanted, number, inputs = None if items is None else set(items), 0, list[Input]()
        for member, extent in zip(self.members[media.kind], self.extents(media), strict=True):
            first, number = number, number + media.parts(extent)
            parts = [at - first for at in range(first, number) if wanted is None or at in wanted]
            if parts and member.frame is not None:
                parts = [member.frame.number]
                if inputs and inputs[-1][0].offset == member.offset and inputs[-1][2][-1] < parts[0]:
                    inputs[-1][2].extend(parts)
                    continue
            if parts:
                inputs.append((member, extent, parts))
        return inputs

    def input_sizes(self, media: Media, items: Collection[int] | None = None) -> list[tuple[int, ...]]:
        """Return `Media.size` of each input of the module's `inputs`."""
        return [media.size(*extent) for _, extent, parts in self.inputs(media, items) for _ in parts]

    def places(self, media: Media) -> list[Place]:
        """Return the sequence tokens and grid of each of the module's items."""
        grids = [media.grid(*extent) if media.grid else None for extent in self.extents(media)]
        return list(zip(self.tokens[media.module], grids, strict=True))

    def require_audio_order(self, conversation: Conversation) -> None:
        """Raise RecordError if the text has audio and videos with sound in another order than the shard."""
        audio = self.members.get("audio", ())
        if len({member.is_sound for member in audio}) < 2:
            return
        videos = iter([member for member in self.members["image"] if member.kind == "video"])
        parts = [part.kind for turn in conversation.turns for part in turn.parts if part.kind in ("audio", "video")]
        are_sounds = [kind == "video" for kind in parts if kind == "audio" or next(videos).sound]
        if are_sounds != [member.is_sound for member in audio]:
            raise RecordError(
                f"key {self.key!r}: the record marks {', '.join(f'<{kind}>' for kind in parts)}, but its audio and "
                f"videos with sound are {', '.join(f'.{shown(member.extension)}' for member in audio)}. Bring them "
                "into the same order"
            )

    def media_tokens(self, modules: Sequence[Media], placeholders: Mapping[str, int]) -> MediaTokens:
        """Return the placeholder ids and texts of its media. `placeholders`: module -> id."""
        texts = {
            media.module: media.texts(placeholders[media.module], self.extents(media), self.tokens[media.module])
            for media in modules
        }
        tokens: dict[str, list[list[tuple[int, ItemText]]]] = {kind: [] for kind in [*self.members, "video"]}
        for kind, members in self.members.items():
            for at, member in enumerate(members):
                if member.is_sound:
                    continue  # in the text of its video
                readers = (media for media in modules if media.kind == kind)
                items = [(placeholders[media.module], texts[media.module][at]) for media in readers]
                tokens["video" if is_video(extent_of(member)) else kind].append(items)
        return tokens


class SampleTable:
    """Describes the samples of a dataset. See `data.samples.shard_dataset.ShardDataset` for the arguments."""

    def __init__(
        self, modules: Sequence[Media], sequence_length: int, bounds: Bounds, sampling: Sampling = SAMPLING
    ) -> None:
        self._modules, self._sequence_length = tuple(modules), sequence_length
        self._bounds = bounds
        self._sampling: Sampling | None = sampling
        self._of_kind: dict[str, list[int]] = {}
        for number, media in enumerate(self._modules):
            self._of_kind.setdefault(media.kind, []).append(number)
        self._known: dict[tuple[str, tuple[int, ...], bool], Measured | str] = {}
        readers = {bool(media.video_frames): media.module for media in self._modules if media.kind == "image"}
        if len(readers) == 2:
            raise DataError(
                f"modules.{readers[True]} reads videos as such, and modules.{readers[False]} as images. Remove one of "
                "them: modules that read images must agree"
            )
        if True in readers:
            self._sampling = None
        self._has_sound = any(media.sound for media in self._modules)
        assert not self._has_sound or len(self._of_kind.get("audio", ())) == 1, "one module of audio reads sound"

    def measured(self, kind: str, extent: tuple[int, ...], several: bool) -> Measured | str:
        """Return the sizes of one item for each module of its kind, or the end of an error message. `several` is True
        if the sample has several of the kind, videos that are one item not counted."""
        key = kind, extent, several
        measured = self._known.get(key)
        if measured is None:
            measured = self._known[key] = self._measure(*key)
        return measured

    def _measure(self, kind: str, extent: tuple[int, ...], several: bool) -> Measured | str:
        if 0 in extent:
            return " has no readable header"
        if excess := self._bounds.excess_of_extent(kind, *extent[:2]):
            return f": {excess}"
        measured, original = [], extent
        for number in self._of_kind[kind]:
            media = self._modules[number]
            extent = media.extents([original] * (1 + several))[0]
            if excess := media.excess(original[:2], extent, self._bounds):
                return f": {excess}"
            try:
                media.size(*extent)
                tokens = media.sequence_tokens(*extent)
            except Exception as error:  # an EncoderError, or any error of a user's encoder
                reason = error if isinstance(error, ValueError) else reason_of(error)
                return f" of {original}: module {media.module} cannot take it: {reason}"
            if not tokens:
                return f" of {original}: it is too small or too short for a token of module {media.module}"
            load = media.inner_tokens(*extent) if media.inner_tokens else tokens
            measured.append((tokens, load, media.pairs(*extent) if media.pairs else load**2, media.parts(extent)))
        return tuple(measured)

    def one(self, index: ShardIndex, shard: int, row: int, number: int) -> SampleMeta:
        """Return a row of a shard; `number` is the sample number or -1."""
        key, reason, at = SampleKey(partial(index.key, row)), index.bad_reason(row), index.record(row)
        every = index.members(row)
        if not self._has_sound:
            every = [member._replace(sound=0) if member.sound else member for member in every]
        members = {
            kind: images_of(every, self._sampling) if kind == "image" else audio_of(every) for kind in self._of_kind
        }
        tokens: dict[str, list[int]] = {}
        record = () if at is None else (every[at],)
        texts = tuple(member for member in every if member.extension in index.fields.members) or record
        if reason is None:
            tokens, reason = self.tokens_of(members)
        if reason is not None:
            members, tokens = {kind: [] for kind in self._of_kind}, {media.module: [] for media in self._modules}
        others = NO_OTHER_MEMBERS
        if reason is None and len(every) > len(texts):
            others = other_members(every, index.fields)
        return SampleMeta(number, shard, row, key, texts, members, tokens, reason, others, index.fields)

    def tokens_of(self, members: Mapping[str, Sequence[Member]]) -> tuple[dict[str, list[int]], str | None]:
        """Return (`SampleMeta.tokens`, None), or ({}, why the members make the sample bad)."""
        tokens: dict[str, list[int]] = {media.module: [] for media in self._modules}
        for kind, numbers in self._of_kind.items():
            several = sum(not is_video(extent_of(member)) for member in members[kind]) > 1
            for member in members[kind]:
                name = f"member .{shown(member.extension)}"
                if 0 in member.extent:
                    return {}, f"{name} ({member.size} bytes) {why_unreadable(member.extension, member.kind)}"
                if member.kind == "video" and (excess := self._bounds.excess("seconds", member.milliseconds / 1000)):
                    return {}, f"{name}: {excess}"
                measured = self.measured(kind, extent_of(member._replace(sound=0)), several)
                if isinstance(measured, str):
                    return {}, name + measured
                for number, (count, *_) in zip(numbers, measured, strict=True):
                    tokens[self._modules[number].module].append(count)
        needed = sum(map(sum, tokens.values()))
        if needed > self._sequence_length:
            bound = f"data.sequence_length is {self._sequence_length}"
            remedy = self._fewer_frames() if any(item.kind == "video" for item in members.get("image", ())) else ""
            return {}, f"its media alone need {needed} tokens, but {bound}. Raise it, or use smaller media{remedy}"
        return tokens, None

    def _fewer_frames(self) -> str:
        reader = next(media for media in self._modules if media.kind == "image")
        key = "data.video" if reader.video_frames is None else f"modules.{reader.module}.encoder.video"
        return f", or fewer frames of videos ({key})"

    def step(
        self, rows: Rows, lengths: np.ndarray | None = None, fields: Sequence[tuple[Fields, np.ndarray]] = ()
    ) -> StepSamples:
        """Return the token counts of a step's samples, with their text `lengths` ([samples], or [samples, answers]);
        zeros for those that are bad by the index. `fields` has (`data.fields`, places of its samples) of each source
        with fields."""
        members, firsts, size = rows.members, rows.firsts, len(rows.samples)
        sizes = np.zeros((size, len(self._modules), 3), dtype=np.int64)
        bad, kind_of_member, order = self._arranged(rows, fields)
        owners, media = np.repeat(np.arange(size), np.diff(firsts)), dict[str, MediaItems]()
        for at, (kind, numbers) in enumerate(self._of_kind.items()):
            videos = kind_of_member == _VIDEO
            sounds = videos & (members["sound"] > 0) & (kind == "audio") & self._has_sound
            videos &= kind == "image"
            which = order[((kind_of_member == at) | videos | sounds)[order]]
            owner = owners[which]
            extents, times, usable = self._extents(members[which], videos[which])
            extents[sounds[which], 0], extents[sounds[which], 1] = members["sound"][which][sounds[which]], 1000
            count = _sums(owner, np.where(extents[:, 2] > 0, 0, times), size)
            several = (count > 1)[owner].astype(np.int64)
            measured, readable = self._look_up(kind, np.column_stack([extents, several]))
            bad[owner[~(readable & usable)]] = True
            for place, number in enumerate(numbers):
                module, parts = self._modules[number], np.maximum(measured[:, place, 3], 1)
                (shares, (left, *_)), inputs = np.divmod(measured[:, place, :3].T, parts), parts * times
                assert not left.any(), f"{module.module}: parts of a video have equal tokens"
                samples, *columns, parts = (np.repeat(values, inputs) for values in (owner, *shares, inputs))
                of_sample = np.arange(len(samples)) - np.searchsorted(samples, samples)
                work = whole_work(columns[1], columns[2], module.pair_cost)
                media[module.module] = MediaItems(samples, of_sample, columns[0], columns[1], work, parts)
                for column, values in enumerate(columns):
                    sizes[:, number, column] = _sums(samples, values, size)
        bad |= sizes[:, :, 0].sum(axis=1) > self._sequence_length
        sizes[bad] = 0
        items = {name: of_module[~bad[of_module.places]] for name, of_module in media.items()}
        tokens, loads, pairs = (
            {media.module: sizes[:, number, column] for number, media in enumerate(self._modules)}
            for column in range(3)
        )
        documents = None
        if lengths is not None and lengths.ndim > 1:
            lengths, documents = lengths.sum(axis=1), list(lengths)
        return StepSamples(tokens, loads, pairs, lengths, documents, items)

    def _extents(self, members: np.ndarray, videos: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (extents, int64 [members, 5], with -1 behind those of two numbers; the images that each becomes; True
        within the video bounds). `videos`: True for each video."""
        extents = np.full((len(members), 5), -1, dtype=np.int64)
        extents[:, 0], extents[:, 1] = members["first"], members["second"]
        times, usable = np.ones(len(members), dtype=np.int64), np.ones(len(members), dtype=bool)
        if videos.any():
            of_videos = np.column_stack(unpack_video(extents[videos, 0], extents[videos, 1]))
            milliseconds = milliseconds_of(*of_videos[:, 2:].T)
            usable[videos] = (milliseconds > 0) & (milliseconds / 1000 <= self._bounds.seconds)
            if self._sampling is None:
                extents[videos] = of_videos
            else:
                extents[videos, :2] = of_videos[:, :2]
                times[videos] = self._sampling.counts(milliseconds)
        return extents, times, usable

    def _arranged(
        self, rows: Rows, fields: Sequence[tuple[Fields, np.ndarray]]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (True for each sample that its names make bad, kind number of each member or -1, the members of each
        sample in the order of their placeholders)."""
        number = {kind: at for at, kind in enumerate(self._of_kind)}
        number |= {"video": _VIDEO} if "image" in number else {}
        codes = rows.members["code"]
        bad = (rows.samples["reason"] != 0) | (rows.samples["record"] < 0)
        kinds = np.array([number.get(kind, -1) for kind in rows.kinds], dtype=np.int64)[codes]
        firsts, order = rows.firsts.tolist(), np.arange(len(kinds))
        for of_source, places in fields:
            for at in places.tolist():
                start, end = firsts[at : at + 2]
                arranged = arrange(tuple(rows.names[code] for code in codes[start:end].tolist()), of_source)
                bad[at] = arranged.reason is not None or arranged.record < 0
                order[start:end] = start + np.array(arranged.order, dtype=np.int64)
                for place, kind in zip(arranged.order, arranged.kinds, strict=True):
                    kinds[start + place] = number.get(kind, -1)
        return bad, kinds, order

    def _look_up(self, kind: str, members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return `measured`, int64 [members, modules of the kind, 4], and True where usable. `members` is int64
        [members, 6]: extent, and 1 if there are several. Each distinct row is measured once."""
        distinct, codes = _distinct(members)
        sizes = np.zeros((len(distinct), len(self._of_kind[kind]), 4), dtype=np.int64)
        readable = np.ones(len(distinct), dtype=bool)
        for at, (*extent, several) in enumerate(distinct.tolist()):
            measured = self.measured(kind, tuple(extent[: 2 if extent[-1] < 0 else 5]), bool(several))
            readable[at] = not isinstance(measured, str)
            sizes[at] = 0 if isinstance(measured, str) else measured
        return sizes[codes], readable[codes]


def extent_of(member: Member) -> tuple[int, ...]:
    """Return the extent of an item: that of a frame if the member is one of a video."""
    if member.kind == "video" and member.frame is None:
        sound = (member.sound,) if member.sound else ()
        return member.height, member.width, member.frames, member.rate, member.rate_base, *sound
    return member.extent


def lengths_key(read_as: str, sequence_length: int, bounds: Bounds, modules: Sequence[Media]) -> str:
    """Return a hash of everything that determines text lengths besides the shard (`text_lengths`).

    `read_as` changes with everything that determines a record's tokens. Modules are identified by `Media.identity`, or
    by their token counts for some hundred sizes.
    """
    table = SampleTable([media for media in modules if not media.identity], sequence_length, bounds)
    sizes = {
        kind: [
            None if isinstance(measured, str) else measured
            for extent in _probes(kind)
            for measured in (table.measured(kind, extent, several) for several in (False, True))
        ]
        for kind in dict.fromkeys(media.kind for media in modules if not media.identity)
    }
    identities = [media.identity for media in modules if media.identity]
    text = json.dumps([_LENGTHS_VERSION, read_as, sequence_length, asdict(bounds), sizes, *identities])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _probes(kind: str) -> list[tuple[int, int]]:
    probes = []
    for number in range(_PROBES):
        first, second = (splitmix(2 * number + at) / 2**64 for at in range(2))
        if kind == "image":
            probes.append((int(8192**first), int(8192**second)))
        else:
            probes.append((int(3e7**first), _RATES[int(second * len(_RATES))]))
    return probes


def other_members(members: Sequence[Member], fields: Fields = NO_FIELDS) -> OtherMembers:
    """Return the members next to the record; unread ones only without `data.fields`."""
    names: dict[str, list[str]] = {}
    for member in members:
        names.setdefault(member.kind, []).append(member.extension)
    extensions = [member.extension for member in members]
    return OtherMembers(names, [] if fields != NO_FIELDS else [name for name, _ in unread(extensions)])


def _sums(owner: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """Return sums of values by ascending owner, int64 [size]; `bincount` would sum in floating point."""
    ends = np.concatenate([[0], np.cumsum(values)])
    bounds = np.searchsorted(owner, np.arange(size + 1))
    return ends[bounds[1:]] - ends[bounds[:-1]]


def _distinct(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (distinct rows, index of each row's), of int64 [N, columns]."""
    mixed = np.zeros(len(rows), dtype=np.uint64)
    for column in rows.T:  # sorting numbers is ten times as fast as sorting rows
        mixed = (mixed ^ column.astype(np.uint64)) * _MIX
        mixed ^= mixed >> np.uint64(29)
    _, firsts, codes = np.unique(mixed, return_index=True, return_inverse=True)
    distinct = rows[firsts]
    if (distinct[codes] != rows).any():  # a hash collision
        distinct, codes = np.unique(rows, axis=0, return_inverse=True)
    return distinct, codes.reshape(-1)
