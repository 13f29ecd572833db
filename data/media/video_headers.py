"""Headers of videos: size, length and orientation from the first or last bytes of a file, without decoding it. Read are
MP4 and MOV (ISO/IEC 14496-12), WebM and Matroska (RFC 9559) that say how long they are. Imports no torch.

A parser of our own, so that an index is the same wherever it is built, whatever is installed to decode with.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from data.media.iso_boxes import Box, ReadAt, boxes_in, boxes_of_file, child, number

_LARGEST_HEAD = 64 << 20  # bytes of what describes the frames of an MP4 file: a few for each
_LARGEST_PART = 1 << 20  # bytes of what describes the tracks of a Matroska file
_FIRST = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")
"""Boxes that an MP4 or MOV file may begin with."""
_TURNS = {(1, 0, 0, 1): 0, (0, 1, -1, 0): 1, (-1, 0, 0, -1): 2, (0, -1, 1, 0): 3}
"""Matrix of a track, without what moves it -> quarter turns clockwise."""
_EBML, _SEGMENT, _INFO, _TRACKS, _CLUSTER = 0x1A45DFA3, 0x18538067, 0x1549A966, 0x1654AE6B, 0x1F43B675
_SCALE, _DURATION, _TRACK, _TYPE, _VIDEO, _WIDTH, _HEIGHT = 0x2AD7B1, 0x4489, 0xAE, 0x83, 0xE0, 0xB0, 0xBA
_MOST_PARTS = 1 << 12


class VideoHeader(NamedTuple):
    """What a video's header says. `height` and `width` are in pixels after `turns`."""

    container: str
    """"mov" (MP4 too) or "matroska" (WebM too), as libavformat calls what reads it."""
    height: int
    width: int
    milliseconds: int
    """Its length; at least 1."""
    turns: int
    """Quarter turns clockwise that make it upright."""
    frames: int
    """Most frames or packets of any of its tracks; 0: not said."""


def parse_video_header(read: ReadAt, size: int) -> VideoHeader | None:
    """Header of a video of `size` bytes, or None if there is none that we can read, if it does not say how long the
    video is, or if the end of the file is missing. Never raises for bad bytes."""
    magic = read(0, 12)
    if magic[:4] == _EBML.to_bytes(4, "big"):
        return _matroska(read, size)
    if magic[4:8] in _FIRST:
        return _mp4(read, size)
    return None


def parse_video_header_bytes(raw: bytes) -> VideoHeader | None:
    """`parse_video_header` for a member that is in memory."""
    return parse_video_header(lambda offset, length: raw[offset : offset + length], len(raw))


def _mp4(read: ReadAt, size: int) -> VideoHeader | None:
    boxes = boxes_of_file(read, size)
    head = next((box for box in boxes or () if box.name == b"moov"), None)
    if head is None or head.end - head.start > _LARGEST_HEAD:
        return None
    raw = read(head.start, head.end - head.start)
    if child(raw, b"mvex") is not None:  # in fragments: how long it is stands in each
        return None
    movie = child(raw, b"mvhd")
    tracks = [box for box in boxes_in(raw) if box.name == b"trak"]
    video = next((box for box in tracks if _handler(raw, box) == b"vide"), None)
    if movie is None or video is None:
        return None
    # Behind the creation and modification times, of 4 or 8 bytes each.
    scale = number(raw, movie.start + (20 if raw[movie.start : movie.start + 1] == b"\1" else 12))
    sizes, turns = _coded_size(raw, video), _turns(raw, video)
    milliseconds = _edited(raw, video, scale) or _summed(raw, video)
    frames = max(_table(raw, box, b"stsz", at=8) for box in tracks)
    if turns is None:
        return None
    height, width = sizes if turns % 2 == 0 else sizes[::-1]
    return _header("mov", height, width, milliseconds, turns, frames)


def _handler(raw: bytes, track: Box) -> bytes:
    found = child(raw, b"mdia", b"hdlr", start=track.start, end=track.end)
    return raw[found.start + 8 : found.start + 12] if found else b""


def _coded_size(raw: bytes, track: Box) -> tuple[int, int]:
    """(height, width) of the first description of its frames; zeros without any."""
    found = child(raw, b"mdia", b"minf", b"stbl", b"stsd", start=track.start, end=track.end)
    at = found.start + 8 if found else len(raw)  # behind version, flags and the number of descriptions
    return number(raw, at + 34, 2), number(raw, at + 32, 2)


def _turns(raw: bytes, track: Box) -> int | None:
    """Quarter turns; None for any other matrix."""
    found = child(raw, b"tkhd", start=track.start, end=track.end)
    if found is None:
        return None
    at = found.start + (52 if raw[found.start : found.start + 1] == b"\1" else 40)
    if len(raw) < at + 36:
        return None
    a, b, u, c, d, v, _, _, _ = struct.unpack_from(">9i", raw, at)
    if (u, v) != (0, 0) or any(one % (1 << 16) for one in (a, b, c, d)):
        return None
    return _TURNS.get((a >> 16, b >> 16, c >> 16, d >> 16))


def _edited(raw: bytes, track: Box, scale: int) -> int:
    """Milliseconds of the parts of a track that its edit list shows; 0 without a list."""
    found = child(raw, b"edts", b"elst", start=track.start, end=track.end)
    if found is None or not scale:
        return 0
    long = raw[found.start : found.start + 1] == b"\1"
    form, step = (">Qq", 20) if long else (">Ii", 12)
    shown = 0
    for at in range(found.start + 8, min(found.end, found.start + 8 + step * number(raw, found.start + 4)), step):
        if at + step > len(raw):
            return 0
        length, media = struct.unpack_from(form, raw, at)
        shown += length if media >= 0 else 0
    return shown * 1000 // scale


def _summed(raw: bytes, track: Box) -> int:
    """Milliseconds of the frames of a track."""
    media = child(raw, b"mdia", b"mdhd", start=track.start, end=track.end)
    table = child(raw, b"mdia", b"minf", b"stbl", b"stts", start=track.start, end=track.end)
    if media is None or table is None:
        return 0
    scale = number(raw, media.start + (20 if raw[media.start : media.start + 1] == b"\1" else 12))
    entries = raw[table.start + 8 : min(table.end, table.start + 8 + 8 * number(raw, table.start + 4))]
    units = sum(count * length for count, length in struct.iter_unpack(">II", entries[: len(entries) // 8 * 8]))
    return units * 1000 // scale if scale else 0


def _table(raw: bytes, track: Box, name: bytes, at: int) -> int:
    """A number in a table of a track; 0 without it."""
    found = child(raw, b"mdia", b"minf", b"stbl", name, start=track.start, end=track.end)
    return number(raw, found.start + at) if found else 0


def _matroska(read: ReadAt, size: int) -> VideoHeader | None:
    ends = [_element(read, 0, size)]
    segment = ends[0] and _element(read, ends[0].end, size)
    if segment is None or segment.name != _SEGMENT:
        return None
    length, sizes = 0, (0, 0)
    for one in _elements(read, segment.start, segment.end):
        if one.name == _CLUSTER or one.end - one.start > _LARGEST_PART:
            if one.name in (_CLUSTER, _INFO, _TRACKS):
                break
            continue
        raw = read(one.start, one.end - one.start)
        if one.name == _INFO:
            length = _matroska_length(raw)
        elif one.name == _TRACKS:
            sizes = _matroska_size(raw)
    return _header("matroska", *sizes, length, 0, 0)


def _matroska_length(raw: bytes) -> int:
    found = {one.name: raw[one.start : one.end] for one in _inside(raw, 0, len(raw))}
    said = found.get(_DURATION, b"")
    if len(said) not in (4, 8):
        return 0
    (units,) = struct.unpack(">f" if len(said) == 4 else ">d", said)
    scale = int.from_bytes(found[_SCALE], "big") if _SCALE in found else 1_000_000
    return int(units * scale / 1e6) if 0 < units < 1e15 else 0


def _matroska_size(raw: bytes) -> tuple[int, int]:
    """(height, width) of the first track of pictures; zeros without any."""
    for track in _inside(raw, 0, len(raw)):
        if track.name != _TRACK:
            continue
        found = {one.name: one for one in _inside(raw, track.start, track.end)}
        kind, video = found.get(_TYPE), found.get(_VIDEO)
        if kind is None or video is None or raw[kind.start : kind.end] != b"\1":
            continue
        own = {one.name: one for one in _inside(raw, video.start, video.end)}
        sides = [own.get(name) for name in (_HEIGHT, _WIDTH)]
        height, width = (int.from_bytes(raw[one.start : one.end], "big") if one else 0 for one in sides)
        return height, width
    return 0, 0


class _Element(NamedTuple):
    name: int
    start: int
    end: int


def _inside(raw: bytes, start: int, end: int) -> Iterator[_Element]:
    return _elements(lambda at, length: raw[at : at + length], start, end)


def _elements(read: ReadAt, start: int, end: int) -> Iterator[_Element]:
    for _ in range(_MOST_PARTS):
        one = _element(read, start, end)
        if one is None:
            return
        yield one
        start = one.end


def _element(read: ReadAt, start: int, end: int) -> _Element | None:
    """The element that begins at a place; None where it has no length, or does not end before `end`."""
    head = read(start, 12) if start < end else b""
    if not head or not head[0]:
        return None
    of_name = 9 - head[0].bit_length()
    if of_name > 4 or len(head) <= of_name or not head[of_name]:
        return None
    of_length = 9 - head[of_name].bit_length()
    length = number(head, of_name, of_length) & ((1 << 7 * of_length) - 1)
    at = start + of_name + of_length
    if length == (1 << 7 * of_length) - 1 or at + length > end:  # the first: of unknown length
        return None
    return _Element(number(head, 0, of_name), at, at + length)


def _header(container: str, height: int, width: int, milliseconds: int, turns: int, frames: int) -> VideoHeader | None:
    if not (0 < height < 1 << 31 and 0 < width < 1 << 31 and 0 < milliseconds < 1 << 31):
        return None
    return VideoHeader(container, height, width, milliseconds, turns, frames)
