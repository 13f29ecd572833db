"""Samples of WebDataset shards: global sample number -> tokens, images or token counts, by the index.

The ranks of a run rely on three promises. Index data (`data.samples.sample_meta`: token counts, sizes) is the same on
every rank and costs no read. Text and media are read separately: a rank that reads text never touches a pixel. A bad
sample never changes a shape:

* If its index data shows it (no record, no readable header, a size that a module rejects, more media tokens than
  `sequence_length`), every rank replaces the sample by a text without media, with token counts of 0.
* If reading shows it (damaged bytes, bad JSON, placeholders that do not match), the replacement has the token counts
  and sizes of the index, no loss, and zeros for pixels: other ranks cannot detect the damage.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from data import collate
from data.errors import (
    OF_THE_MACHINE,
    DataError,
    DecodeError,
    NothingToLearn,
    RecordError,
    SampleError,
    reason_of,
)
from data.index.catalogue import open_catalogue
from data.index.shard_index import Member
from data.media.audio import decode_audio, decode_sound
from data.media.decode import decode_image_file, fitted
from data.media.options import BOUNDS, WHITE, Bounds, Colour
from data.media.video import decode_video
from data.order.mixture import Phase
from data.order.sources import Shards, Source, fingerprint_of, found_shards, order_of, sources_of
from data.order.step import StepSamples, TextSample
from data.records.conversation import Conversation
from data.records.members import NO_FIELDS, Fields
from data.records.preferences import Preference, parse_preference, parse_preference_fields
from data.records.records import RecordParser, parse_fields, parse_record
from data.rows.row_reader import RowReader, is_table
from data.rows.samples import parse_row
from data.samples.answers import ANSWERS, joined, rows_before, with_answer_of
from data.samples.bad_samples import BadSample, BadSamples, allowed_of
from data.samples.media_spec import SAMPLING, Media, MediaInput, Sampling, is_video
from data.samples.positions import positioned
from data.samples.protocol import Samples
from data.samples.sample_meta import SampleMeta, SampleTable, lengths_key
from data.storage.file_cache import FileCache
from data.storage.files import RETRIES, ShardVersion
from data.storage.url import Place, Url
from data.text.tokens import Tokenizer
from data.text_format import plural, shown

_OPEN_INDEXES = 256  # their keys may be unpacked
_RECENT = 512  # cached metas and versions: several readers of a step ask for the same sample


class ShardDataset(Samples):
    """An endless, shuffled stream of samples over WebDataset shards, addressed by number. Thread-safe.

    shards: see `find_shards`, or `Source`s to mix; tokenizer: see `build_tokenizer`, made with each module's
    placeholder; sequence_length: S; media: the encoder modules (if several take one kind, each image expands to the
    tokens of each, in this order); seed, shuffle, shuffle_block: see `GlobalOrder`; cache_dir: folder for indexes,
    instead of next to the shards; blind: return zeros as pixels and waveforms without reading; max_bad_samples: see
    `allowed_of`; keep_text: keep questions in text samples; read_retries: retries after an I/O error; bounds: limits of
    a sample; background: see `decode_image_file`; fields: `data.fields`; sampling: of videos; skip_null: samples with
    null or blank answers have no loss and are not bad; held_fraction: share of held-out samples, see `held_rows`;
    only_held: use only these; members_cache: keeps reads of remote shards; form: of records, see `answers.ANSWERS`.

    Raises DataError (no shards or samples), ShardError (an unusable or changing shard), ReadError (an I/O error).
    """

    shards: list[Place]

    def __init__(
        self,
        shards: Shards | Sequence[Source],
        *,
        tokenizer: Tokenizer,
        sequence_length: int,
        media: Sequence[Media] = (),
        seed: int = 0,
        shuffle: bool = True,
        shuffle_block: int = 1,
        cache_dir: str | os.PathLike[str] | None = None,
        blind: bool = False,
        max_bad_samples: float = 0,
        keep_text: bool = False,
        read_retries: int = RETRIES,
        bounds: Bounds = BOUNDS,
        background: Colour | None = WHITE,
        fields: Fields = NO_FIELDS,
        sampling: Sampling = SAMPLING,
        skip_null: bool = False,
        held_fraction: float = 0.0,
        only_held: bool = False,
        members_cache: FileCache | None = None,
        form: str = "turns",
    ) -> None:
        assert sequence_length > 0, sequence_length
        self.sources = sources_of(shards)
        shards_of_sources = [found_shards(source) for source in self.sources]
        self.shards = [shard for of_source in shards_of_sources for shard in of_source]
        self.tokenizer, self.sequence_length, self.modules = tokenizer, sequence_length, tuple(media)
        self.blind, self.keep_text, self.lookups, self.lengths = blind, keep_text, {}, None
        self.text_fingerprint = tokenizer.fingerprint
        self.bounds, self.background, self._skip_null = bounds, background, skip_null
        self._by_module = {item.module: item for item in self.modules}
        assert len(self._by_module) == len(self.modules), "one Media per module"
        self._placeholders = {item.module: tokenizer.placeholder_id(item.placeholder) for item in self.modules}
        self._table = SampleTable(self.modules, sequence_length, bounds, sampling)
        self._fields = [fields if source.fields is None else source.fields for source in self.sources]
        self.form, self.answers = form, ANSWERS[form]
        parsers: tuple[Callable[..., Any], Callable[..., Any]] = parse_preference, parse_preference_fields
        parse, of_fields = (partial(parser, form=form) for parser in parsers)
        self._parsers = (parse_record, parse_fields) if form == "turns" else (parse, of_fields)
        self.reader, self.cache_dir = RowReader(read_retries, cache=members_cache), cache_dir
        self.index = lru_cache(_OPEN_INDEXES)(
            lambda shard: self.catalogue.index(shard).with_fields(self.fields_of(shard))
        )
        """Return a shard's index, read with its source's `data.fields`."""
        self.meta = lru_cache(_RECENT)(lambda number: self.meta_at(*self._place(number), number))
        """Return the index data of a sample, without reading a member."""
        # A record with a label is read for its sample and for the next one.
        self._recent = lru_cache(_RECENT)(lambda shard, row: self._parsed(self.meta_at(shard, row)))
        self.version = lru_cache(_RECENT)(lambda shard: self.catalogue.version(shard))
        """Return the indexed version of a shard."""
        read_as = [f"{self.text_fingerprint} {of_source} {sampling} {skip_null}" for of_source in self._fields]
        read_as = read_as if form == "turns" else [f"{of_source} {form}" for of_source in read_as]
        self._lengths_keys = [lengths_key(key, sequence_length, bounds, self.modules) for key in read_as]
        self.is_remote = any(isinstance(shard, Url) for shard in self.shards)
        self.catalogue = open_catalogue(self.shards, cache_dir, read_retries)
        counts = self.catalogue.counts.tolist()
        self._ends = np.cumsum(self.catalogue.counts)
        self._begins = self._ends - self.catalogue.counts
        if not self._ends[-1]:
            raise DataError(
                f"data.shards: no sample in {plural(len(self.shards), 'shard')}, for example {self.shards[0]}"
            )
        self._source_ends = np.cumsum([len(paths) for paths in shards_of_sources])
        sizes, contents = self.catalogue.contents()
        of_shards = self._source_ends.tolist(), counts, contents
        self.order = order_of(self.sources, *of_shards, seed, shuffle, shuffle_block, held_fraction, only_held)
        self.allowed_bad_samples = allowed_of(max_bad_samples, len(self))
        self.bad_samples = BadSamples(self.allowed_bad_samples, lambda number: self.order.row(number))
        names = list(zip([shard.name for shard in self.shards], sizes, contents, counts, strict=True))
        self.fingerprint = fingerprint_of(names, self._source_ends.tolist(), held_fraction)
        """Hash of the shards' names, sizes, contents (some blocks) and sample counts in order, their sources, and the
        held-out share. It does not depend on the folder."""

    def locate(self, number: int) -> tuple[Place, str]:
        """Return (shard, key) of a global sample number, of any epoch."""
        shard, row = self._place(number)
        return self.shards[shard], self.index(shard).key(row)

    def identity(self, number: int) -> str:
        """Return an identity of a sample's media, unique over all runs: path and version of its shard, row, fields."""
        shard, row = self._place(number)
        version, named = self.version(shard), self.fields_of(shard).named_media
        place = f"{self.shards[shard].resolve()}|{version.size}|{version.mtime_ns}|{version.content}"
        return f"{place}|{row}{named}"

    def plan_step(self, first: int, size: int) -> StepSamples:
        """Return the index data of samples [first, first + size), without reading a member."""
        rows = self.order.rows(np.arange(first, first + size))
        lengths = None if self.lengths is None else self.lengths[rows].astype(np.int64)
        shards = np.searchsorted(self._ends, rows, side="right")
        sources = np.searchsorted(self._source_ends, shards, side="right")
        fields = [
            (of_source, np.flatnonzero(sources == at))
            for at, of_source in enumerate(self._fields)
            if of_source != NO_FIELDS
        ]
        return self._table.step(self.catalogue.rows(shards, rows - self._begins[shards]), lengths, fields)

    def fields_of(self, shard: int) -> Fields:
        """Return `data.fields` of a shard's source."""
        return self._fields[self._source_of(shard)]

    def lengths_keys(self) -> list[tuple[str, range]]:
        """Return (key of everything that determines text lengths, shards) of each source."""
        begins = [0, *self._source_ends.tolist()]
        return [(key, range(*begins[at : at + 2])) for at, key in enumerate(self._lengths_keys)]

    def samples_of(self, shard: int) -> int:
        """Return the number of samples in a shard."""
        return int(self.catalogue.counts[shard])

    def lengths_of(self, shard: int, row: int) -> list[int]:
        """Return the sequence tokens of each answer of a sample or its stand-in. Reads only records."""
        return [answer.length for answer in self._text(self.meta_at(shard, row))[0].answers]

    def token_counts(self, number: int) -> dict[str, int]:
        """Return module -> sequence tokens of its media in this sample, from the index."""
        return {module: sum(tokens) for module, tokens in self.meta(number).tokens.items()}

    def input_sizes(self, number: int, module: str, items: Collection[int] | None = None) -> list[tuple[int, ...]]:
        """See `Samples.input_sizes`."""
        return self.meta(number).input_sizes(self._by_module[module], items)

    def read_text(self, number: int) -> tuple[TextSample, BadSample | None]:
        """See `Samples.read_text`. Reads only the record."""
        return self._text(self.meta(number))

    def read_media(
        self, number: int, module: str, items: Collection[int] | None = None
    ) -> tuple[list[MediaInput], BadSample | None]:
        """See `Samples.read_media`. Reads only media members."""
        spec, meta = self._by_module[module], self.meta(number)
        if meta.bad_reason is None and not self.blind:
            try:
                return self._decode(spec, meta, items), None
            except Exception as error:
                meta = replace(meta, bad_reason=self._reason(meta, error))
        bad = None if meta.bad_reason is None else self._bad(meta, meta.bad_reason)
        return [blank for _, extent, parts in meta.inputs(spec, items) for blank in spec.blanks(extent, parts)], bad

    def read_record(self, number: int) -> Any:
        """See `Samples.read_record`. Of several JSON members, the first counts. Raises RecordError if it is bad."""
        meta = self.meta(number)
        if meta.texts and is_table(self.shards[meta.shard]):
            return self.reader.record(self.shards[meta.shard], meta.texts[0].offset, self.version(meta.shard))[0]
        for member in meta.texts:
            if member.extension.rpartition(".")[2] == "json":
                return RecordParser({}, self.bounds, ()).record(self.read_member(meta, member), member.extension)
        return None

    def set_phases(self, phases: Sequence[Phase]) -> None:
        """Set the sources' weights, before readers start."""
        super().set_phases(phases)
        self.meta.cache_clear()

    def meta_at(self, shard: int, row: int, number: int = -1) -> SampleMeta:
        """Return `meta` of a row of a shard."""
        return self._table.one(self.index(shard), shard, row, number)

    def unread_members(self) -> Counter[tuple[str, str]]:
        """Return how many members of all samples are unread, by (extension, description)."""
        return sum((self.index(shard).unread() for shard in range(len(self.shards))), Counter())

    def expect_samples(self, wanted: Iterable[tuple[int, Mapping[str, Collection[int]], bool]]) -> None:
        """See `Samples.expect_samples`."""
        self.reader.expect(
            item
            for number, media, text in wanted
            for item in self._ranges(self.meta(number), {} if self.blind else media, text=text)
        )

    def expect_texts(self, shard: int, rows: range) -> None:
        """Start to read the records of some rows of a remote shard."""
        if isinstance(self.shards[shard], Url):
            metas = (self.meta_at(shard, row) for row in rows)
            self.reader.expect(item for meta in metas for item in self._ranges(meta, {}, text=True))

    def close(self) -> None:
        """Close the shard files."""
        self.reader.close()

    def _text(self, meta: SampleMeta) -> tuple[TextSample, BadSample | None]:
        tokens = meta.media_tokens(self.modules, self._placeholders)
        try:
            preference = self.preference(meta)
            where = self.sequence_length, meta.number, meta.key
            answers = []
            for conversation in preference.answers:
                meta.require_audio_order(conversation)
                sample = collate.to_sample(conversation, self.tokenizer, tokens, *where, keep_text=self.keep_text)
                if self.inspects:
                    special = self.tokenizer.special_text.find(conversation)
                    separated = any(turn.has_separators for turn in conversation.turns)
                    sample = replace(sample, special_text=special, has_separators=separated)
                answers.append(positioned(sample, meta, self._placeholders, self.modules))
            return joined(answers, preference.target), None
        except Exception as error:
            skipped = self._skip_null and isinstance(error, NothingToLearn)
            reason = self._reason(meta, error)
            sample = collate.stand_in(self.tokenizer, tokens, self.sequence_length, meta.number)
            if self.keep_text:
                sample = replace(sample, questions=())
            sample = positioned(sample, meta, self._placeholders, self.modules, is_stand_in=True)
            return joined([sample] * self.answers), None if skipped else self._bad(meta, reason)

    def _reason(self, meta: SampleMeta, error: Exception) -> str:
        """Return why a sample is bad. Re-raises errors of its shard, storage, machine or program with its place."""
        place = f"{self.shards[meta.shard]}, key {meta.key!r}"
        if isinstance(error, OF_THE_MACHINE):
            raise type(error)(f"{place}: {error}") from error
        if not isinstance(error, (SampleError, RecursionError, UnicodeError)):
            error.add_note(f"in sample {meta.number}: {place}" if meta.number >= 0 else f"in {place}")
            raise error
        remedy = error.remedy if isinstance(error, SampleError) else ""
        return reason_of(error) + (f"; {remedy}" if remedy else "")

    def _decode(self, spec: Media, meta: SampleMeta, items: Collection[int] | None) -> list[MediaInput]:
        inputs: list[MediaInput] = []
        for member, extent, parts in meta.inputs(spec, items):
            raw = self.read_member(meta, member)
            try:
                if is_video(extent):
                    inputs += spec.of_video(raw, extent, self.bounds, parts)
                    continue
                first, second = spec.size(*extent)
                how = (first, second), spec.resize, spec.canvas(*extent) if spec.canvas else None, self.bounds
                if spec.kind == "audio":
                    decoded = [(decode_sound if member.is_sound else decode_audio)(raw, second, first, self.bounds)]
                elif member.frame is None:
                    decoded = [fitted(decode_image_file(raw, self.bounds, self.background), *how)]
                else:
                    decoded = [fitted(frame, *how) for frame in decode_video(raw, member.frame.of, self.bounds, parts)]
                inputs += decoded if spec.read is None else map(spec.read, decoded)
            except OF_THE_MACHINE:
                raise
            except Exception as error:
                raise DecodeError(f"member .{shown(member.extension)}: {reason_of(error)}") from error
        return inputs

    def preference(self, meta: SampleMeta) -> Preference:
        """Return the answers of a sample. Raises SampleError if its record is bad."""
        preference = self._recent(meta.shard, meta.row) if self.form == "labels" else self._parsed(meta)
        if self.form == "labels":
            (answer,) = preference.answers
            before = self._before(meta) or answer
            preference = replace(preference, answers=(answer, with_answer_of(answer, before, meta.key)))
        if self._skip_null and any(answer.is_blank for answer in preference.answers):
            raise NothingToLearn("its answers are blank")
        return preference

    def _before(self, meta: SampleMeta) -> Conversation | None:
        """Return the last readable sample before this one in its shard, whose last sample is before its first."""
        for row in rows_before(meta.row, self.samples_of(meta.shard)):
            try:
                return self._recent(meta.shard, row).answers[0]
            except (SampleError, RecursionError, UnicodeError):
                continue
        return None

    def _parsed(self, meta: SampleMeta) -> Preference:
        if meta.bad_reason is not None:
            raise RecordError(meta.bad_reason)
        counts, images, shard = meta.counts, meta.visuals, self.shards[meta.shard]
        parse, of_fields = self._parsers
        if is_table(shard):
            record, text_only = self.reader.record(shard, meta.texts[0].offset, self.version(meta.shard))
            every = {kind: len(names) for kind, names in meta.others.names.items()}
            where = meta.fields, meta.key, every, counts, self.bounds, images
            parsed = parse_row(record, text_only, *where, parse=parse)
        else:
            raws = {member.extension: self.read_member(meta, member) for member in meta.texts}
            if meta.fields.texts:
                parsed = of_fields(raws, meta.fields, meta.key, counts, self.bounds, images)
            else:
                ((extension, raw),) = raws.items()
                parsed = parse(raw, extension, meta.key, counts, self.bounds, meta.others, images)
        return parsed if isinstance(parsed, Preference) else Preference((parsed,))

    def _bad(self, meta: SampleMeta, reason: str) -> BadSample:
        return BadSample(
            meta.number,
            self.shards[meta.shard],
            str(meta.key),
            reason.removeprefix(f"key {meta.key!r}: "),
            self.sources[self._source_of(meta.shard)].name,
        )

    def _ranges(
        self, meta: SampleMeta, media: Mapping[str, Collection[int]], *, text: bool
    ) -> Iterator[tuple[Place, int, int, ShardVersion]]:
        if meta.bad_reason is not None:
            return
        shard, version = self.shards[meta.shard], self.version(meta.shard)
        # Once each: a video has many frames, and several modules may read an image.
        inputs = (meta.inputs(self._by_module[module], items) for module, items in media.items())
        members = {member.offset: member for of_module in inputs for member, *_ in of_module}.values()
        texts = meta.texts if text else ()
        if text and self.form == "labels" and (rows := [*rows_before(meta.row, self.samples_of(meta.shard))]):
            texts += self.meta_at(meta.shard, rows[0]).texts
        for member in (*members, *texts):
            yield shard, member.offset, member.size, version

    def read_member(self, meta: SampleMeta, member: Member) -> bytes:
        """Return the bytes of a member of a sample."""
        shard, version = self.shards[meta.shard], self.version(meta.shard)
        return self.reader.read(shard, member.offset, member.size, member.extension, version)

    def _place(self, number: int) -> tuple[int, int]:
        row = self.order.row(number)
        shard = int(np.searchsorted(self._ends, row, side="right"))
        return shard, row - int(self._begins[shard])

    def _source_of(self, shard: int) -> int:
        return int(np.searchsorted(self._source_ends, shard, side="right"))
