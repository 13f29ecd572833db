"""Read samples: tokens of their texts, tensors of their media, or token counts.

The ranks of a run rely on three promises. Metadata (token counts, sizes) is the same on every rank. Text and media are
read separately: a rank that reads text never touches a pixel. A bad sample never changes a shape:

* If metadata shows it (no record, no readable header, a size that a module rejects, more media tokens than
  `sequence_length`), every rank replaces the sample by a text without media, with token counts of 0.
* If reading shows it (damaged bytes, bad JSON, placeholders that do not match), the replacement has the token counts
  and sizes of the metadata, no loss, and zeros for pixels: other ranks cannot detect the damage.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch

from data import collate
from data.errors import (
    OF_THE_MACHINE,
    DecodeError,
    NothingToLearn,
    RecordError,
    SampleError,
    reason_of,
)
from data.index.shard_index import Member
from data.media.decode import decode_frames, decode_media
from data.media.options import Bounds, Colour
from data.records.conversation import Conversation
from data.records.records import parse_fields, parse_record
from data.samples.bad_samples import BadSample
from data.samples.frames import Sampling
from data.samples.media_spec import Media
from data.samples.protocol import Samples
from data.samples.sample_meta import SampleMeta, SampleTable
from data.text.placeholders import axis_positions
from data.text.tokens import Tokenizer
from data.text_format import shown


class RecordSamples(Samples):
    """Samples with records and media. See `Dataset` for the arguments. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        sequence_length: int,
        media: Sequence[Media],
        blind: bool,
        keep_text: bool,
        bounds: Bounds,
        background: Colour | None,
        skip_null: bool,
        sampling: Sampling,
    ) -> None:
        self.tokenizer, self.sequence_length, self.modules = tokenizer, sequence_length, tuple(media)
        self.blind, self.keep_text, self.lookups, self.lengths = blind, keep_text, {}, None
        self.text_fingerprint = tokenizer.fingerprint
        self._bounds, self._background, self._skip_null = bounds, background, skip_null
        self._by_module = {item.module: item for item in self.modules}
        assert len(self._by_module) == len(self.modules), "one Media per module"
        self._placeholders = {item.module: tokenizer.placeholder_id(item.placeholder) for item in self.modules}
        self._table = SampleTable(self.modules, sequence_length, bounds, sampling)

    @abstractmethod
    def meta(self, number: int) -> SampleMeta:
        """Return what is known of a sample before its members are read."""

    @abstractmethod
    def _read(self, meta: SampleMeta, member: Member) -> bytes:
        """Return the bytes of a member."""

    @abstractmethod
    def _source_name(self, shard: int) -> str:
        """Return the name of a shard's source."""

    def token_counts(self, number: int) -> dict[str, int]:
        """Return module -> sequence tokens of its media in this sample, from the index."""
        return {module: sum(tokens) for module, tokens in self.meta(number).tokens.items()}

    def input_sizes(self, number: int, module: str) -> list[tuple[int, int]]:
        """Return `Media.size` of each of the module's items in this sample, from the index."""
        return self.meta(number).input_sizes(self._by_module[module])

    def text(self, number: int) -> collate.TextSample:
        """Return the tokens of a sample or its stand-in. Reads only its record. Raises TooManyBadSamples."""
        sample, bad = self.read_text(number)
        self._record(bad)
        return sample

    def media(self, number: int, module: str) -> list[torch.Tensor]:
        """Return the module's inputs, see `Samples.media`. Reads only media members. Raises TooManyBadSamples."""
        items, bad = self.read_media(number, module)
        self._record(bad)
        return items

    def prompt_and_truth(self, number: int) -> tuple[str, str]:
        """Return (last question, its answer) as text, for reports; ("", "") for a bad sample."""
        meta = self.meta(number)
        try:
            return self._conversation(meta).question_and_truth
        except Exception as error:
            self._reason(meta, error)
            return "", ""

    def read_text(self, number: int) -> tuple[collate.TextSample, BadSample | None]:
        """Return `text`, and a bad sample instead of counting it, since readers run ahead."""
        meta = self.meta(number)
        tokens = meta.media_tokens(self.modules, self._placeholders)
        try:
            conversation = self._conversation(meta)
            self._require_words(conversation)
            where = self.sequence_length, number, meta.key
            sample = collate.to_sample(conversation, self.tokenizer, tokens, *where, keep_text=self.keep_text)
            if self.inspects:
                special = self.tokenizer.special_text.find(conversation)
                separated = any(turn.has_separators for turn in conversation.turns)
                sample = replace(sample, special_text=special, has_separators=separated)
            return self._positioned(sample, meta), None
        except Exception as error:
            skipped = self._skip_null and isinstance(error, NothingToLearn)
            reason = self._reason(meta, error)
            sample = collate.stand_in(self.tokenizer, tokens, self.sequence_length, number)
            if self.keep_text:
                sample = replace(sample, questions=())
            return self._positioned(sample, meta), None if skipped else self._bad(meta, reason)

    def read_media(self, number: int, module: str) -> tuple[list[torch.Tensor], BadSample | None]:
        """Return `media`, and a bad sample instead of counting it."""
        spec, meta = self._by_module[module], self.meta(number)
        members, extents = meta.members[spec.kind], meta.extents(spec)
        if meta.bad_reason is None and not self.blind:
            try:
                return self._decode_all(spec, meta, list(zip(members, extents, strict=True))), None
            except Exception as error:
                meta = replace(meta, bad_reason=self._reason(meta, error))
        dtype = torch.uint8 if spec.kind == "image" and spec.resize.rounded else torch.float32
        zeros = [torch.zeros(spec.blank_shape(extent), dtype=dtype) for extent in extents]
        return zeros, None if meta.bad_reason is None else self._bad(meta, meta.bad_reason)

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

    def _positioned(self, sample: collate.TextSample, meta: SampleMeta) -> collate.TextSample:
        """Add M-RoPE positions to the sample, if the language model has them."""
        if not any(spec.grid for spec in self.modules):
            return sample
        places = {self._placeholders[spec.module]: meta.places(spec) for spec in self.modules}
        return replace(sample, positions=axis_positions(sample.input_ids, places))

    def _decode_all(
        self, spec: Media, meta: SampleMeta, members: Sequence[tuple[Member, tuple[int, int]]]
    ) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        while len(found) < len(members):
            member, extent = members[len(found)]
            found += self._decode(spec, meta, member, extent)
        return found

    def _decode(self, spec: Media, meta: SampleMeta, member: Member, extent: tuple[int, int]) -> list[torch.Tensor]:
        """Return one item, or all frames of a video, which are adjacent in `members`."""
        raw, canvas = self._read(meta, member), spec.canvas(*extent) if spec.canvas else None
        size = spec.size(*extent)
        try:
            if member.frame is not None:
                return decode_frames(raw, member.frame.of, size, spec.resize, canvas, self._bounds)
            return [decode_media(spec.kind, raw, size, spec.resize, canvas, self._bounds, self._background)]
        except OF_THE_MACHINE:
            raise
        except Exception as error:
            raise DecodeError(f"member .{shown(member.extension)}: {reason_of(error)}") from error

    def _conversation(self, meta: SampleMeta) -> Conversation:
        if meta.bad_reason is not None:
            raise RecordError(meta.bad_reason)
        counts, images = meta.counts, meta.visuals
        raws = {member.extension: self._read(meta, member) for member in meta.texts}
        if meta.fields.texts:
            return parse_fields(raws, meta.fields, meta.key, counts, self._bounds, images)
        ((extension, raw),) = raws.items()
        return parse_record(raw, extension, meta.key, counts, self._bounds, meta.others, images)

    def _require_words(self, conversation: Conversation) -> None:
        """Raise NothingToLearn for blank answers with `data.null_captions=skip`."""
        if self._skip_null and conversation.is_blank:
            raise NothingToLearn("its answers are blank")

    def _bad(self, meta: SampleMeta, reason: str) -> BadSample:
        return BadSample(
            meta.number,
            self.shards[meta.shard],
            str(meta.key),
            reason.removeprefix(f"key {meta.key!r}: "),
            self._source_name(meta.shard),
        )

    def _record(self, bad: BadSample | None) -> None:
        if bad is not None:
            self.bad_samples.record(bad)
