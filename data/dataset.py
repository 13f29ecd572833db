"""The dataset: global sample number -> tokens, pictures, or just counts, each read on its own.

Three promises that the ranks of a run rely on:
- What the index says (token counts, sizes) is the same on every rank and costs no read.
- Text and media are read apart: a rank that reads text never touches a pixel.
- A bad sample never changes a shape. There are two kinds:
  * known from the index (no record, a picture or clip without a readable header, a size that a module refuses, more
    media tokens than `sequence_length`): every rank replaces it by a text without media, with token
    counts of 0.
  * found when reading (damaged bytes, bad JSON, placeholders that do not match): its replacement has the token counts
    and sizes of the index, with placeholders without loss and zeros for pixels, because a rank that does not read the
    damaged part cannot detect it.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from data import collate
from data.bad_samples import BadSample, BadSamples, allowed_of
from data.beside import ALONE, Beside
from data.bounds import BOUNDS, Bounds
from data.catalogue.catalogue import open_catalogue
from data.errors import (
    DataError,
    DecodeError,
    MemoryShortage,
    NothingToLearn,
    RecordError,
    SampleError,
    reason_of,
)
from data.fields import NO_FIELDS, Fields
from data.index import Member, ShardIndex
from data.media.decode import decode_media
from data.media.ground import WHITE, Colour
from data.members import unread
from data.outline import Media, MediaSize, SampleOutline, count_tokens
from data.positions import axis_positions
from data.records import Conversation, parse_fields, parse_record
from data.sample_key import SampleKey
from data.sample_table import SampleTable, StepSamples, lengths_key
from data.samples import Samples
from data.shown import shown
from data.sources import Shards, Source, fingerprint_of, found_shards, order_of, sources_of
from data.storage.file_cache import FileCache
from data.storage.local import ShardReader
from data.storage.retry import RETRIES
from data.storage.url import Place, Url
from data.storage.version import ShardVersion
from data.templates import MediaTokens
from data.tokens import Tokenizer

_OPEN_INDEXES = 256  # whose keys may be unpacked


class Dataset(Samples):
    """An endless, shuffled stream of samples over WebDataset shards, addressed by number.

    shards: see `find_shards`, or `Source`s that are mixed; tokenizer: see `build_tokenizer`, made with each
    module's placeholder; sequence_length: S; media: the encoder modules (several may take one kind: then each
    picture expands to the tokens of each, in this order); seed, shuffle, shuffle_block: see `GlobalOrder`;
    cache_dir: folder for indexes, instead of beside the shards; blind: pixels and waveforms are zeros and are not
    read; max_bad_samples: how many samples may be bad, see `allowed_of`; keep_text: text samples carry (question,
    truth) too; read_retries: how often a read is tried again after an I/O error; bounds: what is above is bad;
    ground: see `decode_picture`; fields: `data.fields`; skip_null: samples whose answers are null or blank have no
    loss, and are not bad; held_fraction: share of the samples that is held out, see `held_rows`; only_held: the
    samples are these, and not the others. Methods may be called from several threads. members_cache: keeps what is
    read of remote shards.

    Raises DataError (shards not found, none holds a sample), ShardError (a shard is unusable, or changes while it is
    read), ReadError (an I/O error that does not pass).
    """

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
        ground: Colour | None = WHITE,
        fields: Fields = NO_FIELDS,
        skip_null: bool = False,
        held_fraction: float = 0.0,
        only_held: bool = False,
        members_cache: FileCache | None = None,
    ) -> None:
        assert sequence_length > 0, sequence_length
        self.sources = sources_of(shards)
        found = [found_shards(source) for source in self.sources]
        self.shards = [path for paths in found for path in paths]
        self.tokenizer, self.sequence_length, self.modules = tokenizer, sequence_length, tuple(media)
        self.blind, self.keep_text = blind, keep_text
        self._read_retries, self._bounds = read_retries, bounds
        self._ground, self._fields, self._skip_null = ground, fields, skip_null
        self.reader = ShardReader(read_retries, cache=members_cache)
        self.lookups = {}
        self._by_module = {item.module: item for item in self.modules}
        assert len(self._by_module) == len(self.modules), "one Media per module"
        self._kinds = list(dict.fromkeys(item.kind for item in self.modules))
        self._placeholders = {item.module: tokenizer.placeholder_id(item.placeholder) for item in self.modules}
        self.cache_dir = cache_dir
        self._indexes: OrderedDict[int, ShardIndex] = OrderedDict()
        self._lock = threading.Lock()
        self.lengths = None
        self.text_fingerprint = tokenizer.fingerprint
        self._table = SampleTable(self.modules, sequence_length, bounds, fields)
        read_as = f"{self.text_fingerprint} {fields} {skip_null}"
        self.lengths_key = lengths_key(read_as, sequence_length, bounds, self.modules)
        """What the lengths of texts follow from, beside the shards (`data.text_lengths`)."""
        self.is_remote = any(isinstance(path, Url) for path in self.shards)
        """Whether shards are read over a network: then it pays to announce what is read (`data.announce`)."""
        self._catalogue = open_catalogue(self.shards, cache_dir, read_retries)
        counts = self._catalogue.counts.tolist()
        self._ends = np.cumsum(self._catalogue.counts)
        self._begins = self._ends - self._catalogue.counts
        if not self._ends[-1]:
            raise DataError(
                f"data.shards: the {len(self.shards)} shard(s) hold no sample, for example {self.shards[0]}"
            )
        self._source_ends = np.cumsum([len(paths) for paths in found])
        sizes, contents = self._catalogue.contents()
        of_shards = self._source_ends.tolist(), counts, contents
        self.order = order_of(self.sources, *of_shards, seed, shuffle, shuffle_block, held_fraction, only_held)
        self.allowed_bad_samples = allowed_of(max_bad_samples, len(self))
        self.bad_samples = BadSamples(self.allowed_bad_samples, lambda number: self.order.row(number))
        names = list(zip((path.name for path in self.shards), sizes, contents, counts, strict=True))
        self.fingerprint = fingerprint_of(names, self._source_ends.tolist(), held_fraction)
        """Of the shards' names, sizes, contents (some blocks of each) and sample counts, in order, which source each is
        of, and the share that is held out; it does not change when the folder moves."""

    def locate(self, number: int) -> tuple[Place, str]:
        """(shard, key) of a global sample number, of any epoch."""
        shard, row = self._place(number)
        return self.shards[shard], self._index(shard).key(row)

    def identity(self, number: int) -> str:
        """A unique identity over all runs: shard with size, modification time and a sample of its content, and row."""
        shard, row = self._place(number)
        version = self.version(shard)
        place = f"{self.shards[shard].resolve()}|{version.size}|{version.mtime_ns}|{version.content}"
        return f"{place}|{row}"

    def version(self, shard: int) -> ShardVersion:
        """What a shard was when it was indexed."""
        return self._catalogue.version(shard)

    def plan_step(self, first: int, size: int) -> StepSamples:
        """What the index says of samples [first, first + size), all at once; reads no member."""
        rows = self.order.rows(np.arange(first, first + size))
        lengths = None if self.lengths is None else self.lengths[rows].astype(np.int64)
        shards = np.searchsorted(self._ends, rows, side="right")
        return self._table.of(self._catalogue.rows(shards, rows - self._begins[shards]), lengths)

    def samples_of(self, shard: int) -> int:
        """Samples of one shard."""
        return int(self._catalogue.counts[shard])

    def length_of(self, shard: int, row: int) -> int:
        """Tokens that a sample, or its stand-in, takes in the sequence; reads the json or txt member only."""
        outline = self.outline_at(shard, row)
        tokens = self._media_tokens(outline)
        try:
            conversation = self._conversation(outline)
            self._require_words(conversation)
            return collate.length_of(conversation, self.tokenizer, tokens, self.sequence_length, outline.key)
        except Exception as error:
            self._reason(outline, error)
            return len(collate.placeholders_in(tokens))

    def outline(self, number: int) -> SampleOutline:
        """What the index says of a sample; reads no member."""
        return self.outline_at(*self._place(number), number)

    def outline_at(self, shard: int, row: int, number: int = -1) -> SampleOutline:
        """`outline` of a row of a shard."""
        index = self._index(shard)
        key, reason, at = SampleKey(partial(index.key, row)), index.bad_reason(row), index.record(row)
        every = index.members(row)
        members = {kind: [member for member in every if member.kind == kind] for kind in self._kinds}
        tokens: dict[str, list[int]] = {}
        record = () if at is None else (every[at],)
        if reason is None and record and (above := self._bounds.of_record(record[0].size)):
            reason = f"member .{shown(record[0].extension)}: {above}"
        # Of several texts the others' bounds show when they are read.
        texts = tuple(member for member in every if member.extension in self._fields.members) or record
        if reason is None:
            tokens, reason = count_tokens(members, self.modules, self.sequence_length, self._bounds)
        if reason is not None:
            members, tokens = {kind: [] for kind in self._kinds}, {item.module: [] for item in self.modules}
        beside = ALONE
        if reason is None and len(every) > len(texts):
            names = {kind: [member.extension for member in own] for kind, own in members.items()}
            beside = Beside(names, self._unread(member.extension for member in every))
        return SampleOutline(number, shard, key, texts, members, tokens, reason, beside)

    def _unread(self, extensions: Iterable[str]) -> list[str]:
        """Those of a sample that are not read, as far as `data.fields` says nothing about it."""
        return [] if self._fields != NO_FIELDS else [name for name, _ in unread(extensions)]

    def token_counts(self, number: int) -> dict[str, int]:
        """Tokens that each module's pictures or clips take in this sample, from the index alone."""
        return {module: sum(tokens) for module, tokens in self.outline(number).tokens.items()}

    def media_sizes(self, number: int) -> dict[str, MediaSize]:
        """What each module's pictures or clips take in this sample, from the index alone."""
        outline = self.outline(number)
        return {media.module: outline.media_size(media) for media in self.modules}

    def input_sizes(self, number: int, module: str) -> list[tuple[int, int]]:
        """`Media.size` of each of the module's pictures or clips in this sample, from the index alone."""
        return self.outline(number).input_sizes(self._by_module[module])

    def text(self, number: int) -> collate.TextSample:
        """Tokens of a sample, or of its stand-in; reads the json or txt member only. Raises TooManyBadSamples."""
        sample, bad = self.read_text(number)
        self._record(bad)
        return sample

    def media(self, number: int, module: str) -> list[torch.Tensor]:
        """The module's inputs, one per picture (uint8 [3, height, width], in tiles [tiles, 3, side, side]) or clip
        (float32 [samples]); zeros if bad.

        Reads media members only. Raises TooManyBadSamples.
        """
        items, bad = self.read_media(number, module)
        self._record(bad)
        return items

    def prompt_and_truth(self, number: int) -> tuple[str, str]:
        """(last question, its answer) as text, for reports; ("", "") for a bad sample."""
        outline = self.outline(number)
        try:
            return self._conversation(outline).question_and_truth
        except Exception as error:
            self._reason(outline, error)
            return "", ""

    def read_text(self, number: int) -> tuple[collate.TextSample, BadSample | None]:
        """`text`, but a bad sample is returned instead of counted: for readers that run ahead."""
        outline = self.outline(number)
        tokens = self._media_tokens(outline)
        try:
            conversation = self._conversation(outline)
            self._require_words(conversation)
            sample = collate.to_sample(conversation, self.tokenizer, tokens, self.sequence_length, number, outline.key)
            if self.keep_text:
                sample = replace(sample, question_and_truth=conversation.question_and_truth)
            return self._positioned(sample, outline), None
        except Exception as error:
            skipped = self._skip_null and isinstance(error, NothingToLearn)
            reason = self._reason(outline, error)
            sample = collate.stand_in(self.tokenizer, tokens, self.sequence_length, number)
            if self.keep_text:
                sample = replace(sample, question_and_truth=("", ""))
            return self._positioned(sample, outline), None if skipped else self._bad(outline, reason)

    def read_media(self, number: int, module: str) -> tuple[list[torch.Tensor], BadSample | None]:
        """`media`, but a bad sample is returned instead of counted."""
        spec, outline = self._by_module[module], self.outline(number)
        members, extents = outline.members[spec.kind], outline.extents(spec)
        if outline.bad_reason is None and not self.blind:
            try:
                return [self._decode(spec, outline, *pair) for pair in zip(members, extents, strict=True)], None
            except Exception as error:
                outline = replace(outline, bad_reason=self._reason(outline, error))
        dtype = torch.uint8 if spec.kind == "image" else torch.float32
        zeros = [torch.zeros(spec.blank_shape(extent), dtype=dtype) for extent in extents]
        return zeros, None if outline.bad_reason is None else self._bad(outline, outline.bad_reason)

    def unread_members(self) -> Counter[tuple[str, str]]:
        """How many members of all samples are not read, by (extension, what they are)."""
        found: Counter[tuple[str, str]] = Counter()
        for shard in range(len(self.shards)):
            found += self._index(shard).unread()
        return found

    def close(self) -> None:
        """Closes the shard files."""
        self.reader.close()

    def _reason(self, outline: SampleOutline, error: Exception) -> str:
        """Why a sample is bad. Raises what says nothing about the sample, with its place: an error of its shard, of the
        storage, of this machine's memory, or of the program."""
        place = f"{self.shards[outline.shard]}, key {outline.key!r}"
        if isinstance(error, MemoryShortage):
            raise MemoryShortage(f"{place}: {error}") from error
        if not isinstance(error, (SampleError, RecursionError, UnicodeError)):
            error.add_note(f"in sample {outline.number}: {place}" if outline.number >= 0 else f"in {place}")
            raise error
        return reason_of(error)

    def _positioned(self, sample: collate.TextSample, outline: SampleOutline) -> collate.TextSample:
        """The sample with positions on three axes, if the language model has them."""
        if not any(spec.grid for spec in self.modules):
            return sample
        places = {self._placeholders[spec.module]: outline.places(spec) for spec in self.modules}
        return replace(sample, positions=axis_positions(sample.input_ids, places))

    def _decode(self, spec: Media, outline: SampleOutline, member: Member, extent: tuple[int, int]) -> torch.Tensor:
        raw, canvas = self._read(outline, member), spec.canvas(*extent) if spec.canvas else None
        try:
            return decode_media(spec.kind, raw, spec.size(*extent), spec.resize, canvas, self._bounds, self._ground)
        except MemoryShortage:
            raise
        except Exception as error:
            raise DecodeError(f"member .{shown(member.extension)}: {reason_of(error)}") from error

    def _conversation(self, outline: SampleOutline) -> Conversation:
        if outline.bad_reason is not None:
            raise RecordError(outline.bad_reason)
        counts = {kind: len(members) for kind, members in outline.members.items()}
        raws = {member.extension: self._read(outline, member) for member in outline.texts}
        if self._fields.texts:
            return parse_fields(raws, self._fields, outline.key, counts, self._bounds)
        ((extension, raw),) = raws.items()
        return parse_record(raw, extension, outline.key, counts, self._bounds, outline.beside)

    def _require_words(self, conversation: Conversation) -> None:
        """Raises NothingToLearn for answers that are blank, where `data.null_captions` leaves these out."""
        if self._skip_null and conversation.is_blank:
            raise NothingToLearn("its answers are blank")

    def _read(self, outline: SampleOutline, member: Member) -> bytes:
        shard, version = self.shards[outline.shard], self.version(outline.shard)
        return self.reader.read(shard, member.offset, member.size, member.extension, version)

    def _media_tokens(self, outline: SampleOutline) -> MediaTokens:
        return {
            kind: [
                [
                    (self._placeholders[spec.module], outline.tokens[spec.module][at])
                    for spec in self.modules
                    if spec.kind == kind
                ]
                for at in range(len(members))
            ]
            for kind, members in outline.members.items()
        }

    def _place(self, number: int) -> tuple[int, int]:
        row = self.order.row(number)
        shard = int(np.searchsorted(self._ends, row, side="right"))
        return shard, row - int(self._begins[shard])

    def _index(self, shard: int) -> ShardIndex:
        with self._lock:
            index = self._indexes.get(shard)
            if index is None:
                index = self._indexes[shard] = self._catalogue.index(shard).with_fields(self._fields)
                if len(self._indexes) > _OPEN_INDEXES:
                    self._indexes.popitem(last=False)
            self._indexes.move_to_end(shard)
            return index

    def _bad(self, outline: SampleOutline, reason: str) -> BadSample:
        source = int(np.searchsorted(self._source_ends, outline.shard, side="right"))
        return BadSample(
            outline.number,
            self.shards[outline.shard],
            str(outline.key),
            reason.removeprefix(f"key {outline.key!r}: "),
            self.sources[source].name,
        )

    def _record(self, bad: BadSample | None) -> None:
        if bad is not None:
            self.bad_samples.record(bad)
