"""Whether what a file of a catalogue says can be: its checksums tell only that it is what somebody has written.

Numbers and places are compared with each other and with the file before anything is taken by them, so that none ends
in an error that names no file, and no sample has the bytes of another shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from data.errors import DataError
from data.index.named import are_texts
from data.index.shard_index import MEMBER, SAMPLE, Codes

_KINDS = {"image", "video", "audio", "other"}


def codes_of(found: Any) -> Codes:
    """Codes in JSON. Raises DataError for what are none."""
    if not isinstance(found, list) or len(found) != 3 or not all(map(are_texts, found)):
        raise DataError("it has codes that are no texts")
    codes = Codes(*map(tuple, found))
    if len(codes.kinds) != len(codes.extensions) or not set(codes.kinds) <= _KINDS:
        raise DataError("it has kinds of members that there are not")
    return codes


def require_tags(tags: Any) -> None:
    """Raises DataError if these are not the tags of a file."""
    if not isinstance(tags, dict) or not are_texts([*tags.values()]):
        raise DataError("it has tags that are no texts")


def require_table(table: np.ndarray, lengths: np.ndarray, begin: int, size: int, unit: int, codes: int) -> None:
    """Raises DataError if the rows of a file do not fit into it.

    Args:
        lengths: bytes of each part, of rows that are not negative.
        begin, size: first byte of the parts, and behind the last.
        unit: parts begin at multiples of it.
        codes: number of those of the file.
    """
    if not len(table):
        return
    for name in ("samples", "members", "keys"):
        if table[name].min() < 0 or table[name].max() > size:
            raise DataError(f"it has a shard with {name} that it has no room for")
    at = table["at"]
    if at.min() < begin or (at % unit).any() or (at > size - lengths).any():
        raise DataError("it has a shard whose part is not in it")
    if table["codes"].min() < 0 or table["codes"].max() >= codes:
        raise DataError("it has a shard whose codes are not in it")
    if table["size"].min() < 0 or (np.frombuffer(np.ascontiguousarray(table["content"]), dtype=np.uint8) > 127).any():
        raise DataError("it has a shard of a version that there is not")


def rows_fault(body: bytes | memoryview, rows: Sequence[int], size: int, codes: Codes) -> str:
    """Why the rows of a part cannot be those of a shard; empty: they can.

    Args:
        body: begins with its rows.
        rows: samples, members, bytes of keys.
        size: bytes of the shard.
    """
    samples, members, _ = rows
    end = (samples + 1) * SAMPLE.itemsize
    of_samples = np.frombuffer(body[:end], dtype=SAMPLE)
    firsts, own = of_samples["first_member"], of_samples[:-1]
    numbers = np.diff(firsts)
    inside = firsts.min() == firsts[0] == 0 and firsts.max() == firsts[-1] == members
    if not inside or (samples and numbers.min() < 0):
        return "samples whose members are not in it"
    records, reasons = own["record"], own["reason"]
    if samples and (reasons.min() < 0 or reasons.max() > len(codes.reasons)):
        return "samples that are bad for a reason that is not in it"
    if (records < -1).any() or (records >= numbers).any() or ((records < 0) & (reasons == 0)).any():
        return "samples without their record"
    if not members:
        return ""
    of_members = np.frombuffer(body[end : end + members * MEMBER.itemsize], dtype=MEMBER)
    offsets, sizes = of_members["offset"], of_members["size"]
    # Each alone first, since their sum may be more than there are numbers for.
    alone = all(0 <= one.min() and one.max() <= size for one in (offsets, sizes))
    if not alone or (offsets + sizes).max() > size:
        return "members that are not in the shard"
    if of_members["first"].min() < 0 or of_members["second"].min() < 0:
        return "members with negative extents"
    if of_members["code"].min() < 0 or of_members["code"].max() >= len(codes.extensions):
        return "members of a kind that is not in it"
    return ""


def require_head(name: Any, version: Any, rows: Any) -> None:
    """Raises DataError if these are not of a part: name, fields of a `ShardVersion`, rows."""
    lists = isinstance(version, list) and isinstance(rows, list) and (len(version), len(rows)) == (5, 3)
    if not lists or not are_texts([name, *version[3:]]) or not _are_numbers([*version[:3], *rows]):
        raise DataError("it is no part of a shard")
    if version[0] < 0 or min(rows) < 0:
        raise DataError("it has negative sizes")


def _are_numbers(found: Sequence[Any]) -> bool:
    return all(type(one) is int and abs(one) < 2**62 for one in found)
