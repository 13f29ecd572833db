"""The dataset: global sample number -> tokens, images or token counts, by the index.

Index data (`data.samples.sample_meta`: token counts, sizes) is the same on every rank and costs no read.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np

from data import collate
from data.errors import DataError
from data.index.catalogue import open_catalogue
from data.index.shard_index import Member, ShardIndex
from data.media.options import BOUNDS, WHITE, Bounds, Colour
from data.order.mixture import Phase
from data.order.order import GlobalOrder
from data.order.sources import MixedOrder, Shards, Source, fingerprint_of, found_shards, order_of, sources_of
from data.order.step import StepSamples
from data.records.members import NO_FIELDS, Fields
from data.samples.bad_samples import BadSamples, allowed_of
from data.samples.frames import SAMPLING, Sampling
from data.samples.media_spec import Media
from data.samples.record_samples import RecordSamples
from data.samples.sample_meta import SampleMeta, lengths_key
from data.storage.file_cache import FileCache
from data.storage.files import RETRIES, ShardVersion
from data.storage.reader import ShardReader
from data.storage.url import Place, Url
from data.text.tokens import Tokenizer
from data.text_format import plural

_OPEN_INDEXES = 256  # their keys may be unpacked
_RECENT = 512  # cached metas and versions: several readers of a step ask for the same sample


class Dataset(RecordSamples):
    """An endless, shuffled stream of samples over WebDataset shards, addressed by number. Thread-safe.

    shards: see `find_shards`, or `Source`s to mix; tokenizer: see `build_tokenizer`, made with each module's
    placeholder; sequence_length: S; media: the encoder modules (if several take one kind, each image expands to the
    tokens of each, in this order); seed, shuffle, shuffle_block: see `GlobalOrder`; cache_dir: folder for indexes,
    instead of next to the shards; blind: return zeros as pixels and waveforms without reading; max_bad_samples: see
    `allowed_of`; keep_text: keep questions in text samples; read_retries: retries after an I/O error; bounds: limits of
    a sample; background: see `decode_image_file`; fields: `data.fields`; sampling: of videos; skip_null: samples with
    null or blank answers have no loss and are not bad; held_fraction: share of held-out samples, see `held_rows`;
    only_held: use only these; members_cache: keeps reads of remote shards.

    Raises DataError (no shards or samples), ShardError (an unusable or changing shard), ReadError (an I/O error).
    """

    order: GlobalOrder | MixedOrder
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
    ) -> None:
        assert sequence_length > 0, sequence_length
        self.sources = sources_of(shards)
        found = [found_shards(source) for source in self.sources]
        self.shards = [shard for of_source in found for shard in of_source]
        super().__init__(tokenizer, sequence_length, media, blind, keep_text, bounds, background, skip_null, sampling)
        self._fields = [fields if source.fields is None else source.fields for source in self.sources]
        self.reader = ShardReader(read_retries, cache=members_cache)
        self.cache_dir = cache_dir
        self._indexes: OrderedDict[int, ShardIndex] = OrderedDict()
        self._lock = threading.Lock()
        self._recent = lru_cache(_RECENT)(lambda number: self.meta_at(*self._place(number), number))
        self._version = lru_cache(_RECENT)(lambda shard: self._catalogue.version(shard))
        read_as = [f"{self.text_fingerprint} {own} {sampling} {skip_null}" for own in self._fields]
        self._lengths_keys = [lengths_key(one, sequence_length, bounds, self.modules) for one in read_as]
        self.is_remote = any(isinstance(shard, Url) for shard in self.shards)
        self._catalogue = open_catalogue(self.shards, cache_dir, read_retries)
        counts = self._catalogue.counts.tolist()
        self._ends = np.cumsum(self._catalogue.counts)
        self._begins = self._ends - self._catalogue.counts
        if not self._ends[-1]:
            raise DataError(
                f"data.shards: no sample in {plural(len(self.shards), 'shard')}, for example {self.shards[0]}"
            )
        self._source_ends = np.cumsum([len(paths) for paths in found])
        sizes, contents = self._catalogue.contents()
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

    def version(self, shard: int) -> ShardVersion:
        """Return the indexed version of a shard."""
        return self._version(shard)

    def plan_step(self, first: int, size: int) -> StepSamples:
        """Return the index data of samples [first, first + size), without reading a member."""
        rows = self.order.rows(np.arange(first, first + size))
        lengths = None if self.lengths is None else self.lengths[rows].astype(np.int64)
        shards = np.searchsorted(self._ends, rows, side="right")
        sources = np.searchsorted(self._source_ends, shards, side="right")
        fields = [(own, np.flatnonzero(sources == at)) for at, own in enumerate(self._fields) if own != NO_FIELDS]
        return self._table.step(self._catalogue.rows(shards, rows - self._begins[shards]), lengths, fields)

    def fields_of(self, shard: int) -> Fields:
        """Return `data.fields` of a shard's source."""
        return self._fields[self._source_of(shard)]

    def lengths_keys(self) -> list[tuple[str, range]]:
        """Return (key of everything that determines text lengths, shards) of each source."""
        begins = [0, *self._source_ends.tolist()]
        return [(key, range(*begins[at : at + 2])) for at, key in enumerate(self._lengths_keys)]

    def stamps(self) -> np.ndarray:
        """Return `Catalogue.stamps`."""
        return self._catalogue.stamps()

    def samples_of(self, shard: int) -> int:
        """Return the number of samples in a shard."""
        return int(self._catalogue.counts[shard])

    def length_of(self, shard: int, row: int) -> int:
        """Return the sequence tokens of a sample or its stand-in. Reads only the json or txt member."""
        meta = self.meta_at(shard, row)
        tokens = meta.media_tokens(self.modules, self._placeholders)
        try:
            conversation = self._conversation(meta)
            self._require_words(conversation)
            return collate.length_of(conversation, self.tokenizer, tokens, self.sequence_length, meta.key)
        except Exception as error:
            self._reason(meta, error)
            return len(collate.placeholders_in(tokens))

    def meta(self, number: int) -> SampleMeta:
        """Return the index data of a sample, without reading a member."""
        return self._recent(number)

    def set_phases(self, phases: Sequence[Phase]) -> None:
        """Set the sources' weights, before readers start."""
        super().set_phases(phases)
        self._recent.cache_clear()

    def meta_at(self, shard: int, row: int, number: int = -1) -> SampleMeta:
        """Return `meta` of a row of a shard."""
        return self._table.one(self.index(shard), shard, row, number)

    def unread_members(self) -> Counter[tuple[str, str]]:
        """Return how many members of all samples are unread, by (extension, description)."""
        found: Counter[tuple[str, str]] = Counter()
        for shard in range(len(self.shards)):
            found += self.index(shard).unread()
        return found

    def expect_samples(self, wanted: Iterable[tuple[int, Collection[str], bool]]) -> None:
        """Start to read remote samples: (sample number, modules that need its media, True if its record is needed)."""
        self.reader.expect(
            item
            for number, modules, text in wanted
            for item in self._ranges(self.meta(number), () if self.blind else modules, text=text)
        )

    def expect_texts(self, shard: int, rows: range) -> None:
        """Start to read the records of some rows of a remote shard."""
        if isinstance(self.shards[shard], Url):
            metas = (self.meta_at(shard, row) for row in rows)
            self.reader.expect(item for meta in metas for item in self._ranges(meta, (), text=True))

    def close(self) -> None:
        """Close the shard files."""
        self.reader.close()

    def _ranges(
        self, meta: SampleMeta, modules: Collection[str], *, text: bool
    ) -> Iterator[tuple[Place, int, int, ShardVersion]]:
        if meta.bad_reason is not None:
            return
        shard, version = self.shards[meta.shard], self.version(meta.shard)
        kinds = dict.fromkeys(spec.kind for spec in self.modules if spec.module in modules)
        # Once each: a video has many frames.
        members = {member.offset: member for kind in kinds for member in meta.members[kind]}.values()
        for member in (*members, *(meta.texts if text else ())):
            yield shard, member.offset, member.size, version

    def _read(self, meta: SampleMeta, member: Member) -> bytes:
        shard, version = self.shards[meta.shard], self.version(meta.shard)
        return self.reader.read(shard, member.offset, member.size, member.extension, version)

    def _place(self, number: int) -> tuple[int, int]:
        row = self.order.row(number)
        shard = int(np.searchsorted(self._ends, row, side="right"))
        return shard, row - int(self._begins[shard])

    def index(self, shard: int) -> ShardIndex:
        """Return a shard's index, read with its source's `data.fields`."""
        with self._lock:
            index = self._indexes.get(shard)
            if index is None:
                index = self._indexes[shard] = self._catalogue.index(shard).with_fields(self.fields_of(shard))
                if len(self._indexes) > _OPEN_INDEXES:
                    self._indexes.popitem(last=False)
            self._indexes.move_to_end(shard)
            return index

    def _source_name(self, shard: int) -> str:
        return self.sources[self._source_of(shard)].name

    def _source_of(self, shard: int) -> int:
        return int(np.searchsorted(self._source_ends, shard, side="right"))
