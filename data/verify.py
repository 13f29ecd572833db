"""Checking one sample whole: its record, its placeholders, and every picture and clip."""

from __future__ import annotations

from collections import Counter

from data.errors import SampleError
from data.index import ShardIndex
from data.media.decode import decode_audio, decode_picture
from data.records import parse_record
from data.storage.local import ShardReader


def check_sample(reader: ShardReader, index: ShardIndex, row: int) -> str | None:
    """Why the sample is bad, or None. Reads and decodes everything, which a run does not do on any single rank."""
    if reason := index.bad_reason(row):
        return reason
    members, at = index.members(row), index.record(row)
    assert at is not None, "a sample without a record has a reason in the index"
    stamp = (index.size, index.mtime_ns)
    name = ""
    try:
        for member in members:
            name = f"member .{member.extension}: "
            if member.kind != "other":
                raw = reader.read(index.path, member.offset, member.size, member.extension, stamp)
                decode_picture(raw) if member.kind == "image" else decode_audio(raw, rate=member.rate or 16000)
        name, record = "", members[at]
        raw = reader.read(index.path, record.offset, record.size, record.extension, stamp)
        counts = Counter(member.kind for member in members)
        parse_record(raw, record.extension, index.key(row), {kind: counts[kind] for kind in ("image", "audio")})
    except SampleError as error:
        return name + str(error)
    return None
