"""Check a complete sample: its record, its placeholders, and all its media."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from xxhash import xxh3_128_digest

from data.errors import OF_THE_MACHINE, ReadError, ShardError, reason_of
from data.index.shard_index import Member, ShardIndex, pack_video
from data.media.audio import decode_audio
from data.media.decode import decode_image_file
from data.media.video import decode_video
from data.records.conversation import KINDS
from data.records.members import NO_FIELDS
from data.records.preferences import parse_any
from data.rows.row_reader import RowReader, is_table
from data.rows.samples import parse_row
from data.samples.media_spec import SAMPLING, images_of, places_of
from data.samples.sample_meta import other_members
from data.samples.shard_dataset import ShardDataset
from data.text_format import shown


def check_sample(reader: RowReader, index: ShardIndex, row: int) -> str | None:
    """Return why the sample is bad, or None. It reads and decodes everything, unlike any rank of a run.

    Raises ReadError or ShardError if the shard cannot be read, and MemoryShortage or MissingLibrary.
    """
    if reason := index.bad_reason(row):
        return reason
    key, members, at = index.key(row), index.members(row), index.record(row)
    assert at is not None, "a sample without a record has a reason in the index"
    name = ""
    try:
        for member in members:
            name = f"member .{shown(member.extension)}: "
            if member.kind != "other":
                raw = reader.read(index.path, member.offset, member.size, member.extension, index.version)
                _decode(member, raw)
        name, record = "", members[at]
        others, visuals = other_members(members), places_of(images_of(members, SAMPLING))
        counts = {kind: len(others.names.get(kind, ())) for kind in KINDS}
        if is_table(index.path):
            row_record = reader.record(index.path, record.offset, index.version)
            parse_row(*row_record, NO_FIELDS, key, counts, counts, visuals=visuals, parse=parse_any)
            return None
        raw = reader.read(index.path, record.offset, record.size, record.extension, index.version)
        parse_any(raw, record.extension, key, counts, others=others, visuals=visuals)
    except (ReadError, ShardError, *OF_THE_MACHINE):
        raise
    except Exception as error:
        return name + reason_of(error).removeprefix(f"key {key!r}: ")
    return None


def _decode(member: Member, raw: bytes) -> None:
    """Raise DecodeError. For a video, only the default config's frames are checked."""
    if member.kind == "image":
        decode_image_file(raw)
    elif member.kind == "video":
        for _ in decode_video(raw, SAMPLING.count(member.milliseconds)):
            pass
    else:
        decode_audio(raw, rate=member.rate or 16000)


_MOST_READ = 1000  # members of training samples; few other files have the same bytes and pixels


class Shared(NamedTuple):
    """Media that held-out samples share with training samples."""

    samples: int
    """Held-out samples with a media item of a training sample, byte for byte."""
    of: int
    """Held-out samples that were checked."""
    is_whole: bool
    """True if every training sample was compared."""


def shared_media(trained: ShardDataset, held_out: ShardDataset, first: int) -> Shared:
    """Count the first `first` held-out samples that share a media item with a training sample.

    Only items with the same bytes and extent in the indexes are read. Raises ShardError or ReadError if that fails.
    """
    first = min(first, len(held_out))
    of_size: dict[tuple[int, int, int], list[tuple[int, int, Member]]] = {}
    for number in range(first):
        meta = held_out.meta(number)
        for members in meta.members.values():
            for member in members:
                if member.frame is None or member.frame.number == 0:
                    of_size.setdefault(_size(member), []).append((number, meta.shard, member))
    wanted = _mixed(*np.array([*of_size], dtype=np.uint64).reshape(-1, 3).T)
    shared: set[int] = set()
    digests: dict[tuple[int, int], bytes] = {}
    read, begin = 0, 0
    for shard in range(len(trained.shards)) if of_size else ():
        index, end = trained.index(shard), begin + trained.samples_of(shard)
        columns = (index.all_members[name].astype(np.uint64) for name in ("size", "first", "second"))
        alike = np.flatnonzero(np.isin(_mixed(*columns), wanted))
        rows = np.searchsorted(index.samples["first_member"], alike, side="right") - 1
        for row in np.unique(rows[_are_trained(trained, begin + rows)]).tolist():
            for member in index.members(row):
                alike_items = [item for item in of_size.get(_size(member), ()) if item[0] not in shared]
                if not alike_items:
                    continue
                if read == _MOST_READ:
                    return Shared(len(shared), first, False)
                read += 1
                content = _digest(trained, shard, member)
                for number, at, other in alike_items:
                    if (at, other.offset) not in digests:
                        digests[at, other.offset] = _digest(held_out, at, other)
                    if digests[at, other.offset] == content:
                        shared.add(number)
        begin = end
    return Shared(len(shared), first, True)


def _size(member: Member) -> tuple[int, int, int]:
    if member.kind == "video":
        length = member.frames, member.rate, member.rate_base
        return (member.size, *pack_video(member.height, member.width, *length))
    return (member.size, *member.extent)


def _mixed(size: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return size * np.uint64(0x9E3779B97F4A7C15) ^ first * np.uint64(0xBF58476D1CE4E5B9) ^ second


def _are_trained(trained: ShardDataset, rows: np.ndarray) -> np.ndarray:
    held_rows = [part.first + part.held for part in trained.order.parts if part.held is not None]
    return ~np.isin(rows, np.concatenate(held_rows)) if held_rows else np.ones(len(rows), dtype=bool)


def _digest(dataset: ShardDataset, shard: int, member: Member) -> bytes:
    place, version = dataset.shards[shard], dataset.version(shard)
    return xxh3_128_digest(dataset.reader.read(place, member.offset, member.size, member.extension, version))
