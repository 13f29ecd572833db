"""Checking one sample whole: its record, its placeholders, and every picture and clip."""

from __future__ import annotations

from typing import Protocol

from data.errors import OF_THE_MACHINE, ReadError, ShardError, reason_of
from data.index.shard_index import Member, ShardIndex
from data.media.decode import decode_audio, decode_image_file
from data.media.options import BOUNDS
from data.media.video import decode_video
from data.records.conversation import KINDS
from data.records.members import unread
from data.records.record_checks import OtherMembers
from data.records.records import parse_record
from data.samples.frames import SAMPLING, pictures_of, places_of
from data.storage.files import ShardVersion
from data.storage.url import Place
from data.text_format import shown


class MemberReader(Protocol):
    """Reads members: `ShardReader`, or whoever holds them."""

    def read(self, path: Place, offset: int, size: int, extension: str, version: ShardVersion | None = None) -> bytes:
        """`size` bytes at `offset`."""


def check_sample(reader: MemberReader, index: ShardIndex, row: int) -> str | None:
    """Why the sample is bad, or None. Reads and decodes everything, which a run does not do on any single rank.

    Raises ReadError, ShardError: the shard cannot be read; MemoryShortage, MissingLibrary.
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
        if above := BOUNDS.of_record(record.size):
            return above
        raw = reader.read(index.path, record.offset, record.size, record.extension, index.version)
        names = {kind: [one.extension for one in members if one.kind == kind] for kind in KINDS}
        others = OtherMembers(names, [name for name, _ in unread(member.extension for member in members)])
        counts = {kind: len(own) for kind, own in names.items()}
        pictures = places_of(pictures_of(members, SAMPLING))
        parse_record(raw, record.extension, key, counts, others=others, visuals=pictures)
    except (ReadError, ShardError, *OF_THE_MACHINE):
        raise
    except Exception as error:
        return name + reason_of(error).removeprefix(f"key {key!r}: ")
    return None


def _decode(member: Member, raw: bytes) -> None:
    """Raises DecodeError; of a video for the pictures that a config reads that says nothing about it."""
    if member.kind == "image":
        decode_image_file(raw)
    elif member.kind == "video":
        for _ in decode_video(raw, SAMPLING.count(member.milliseconds)):
            pass
    else:
        decode_audio(raw, rate=member.rate or 16000)
