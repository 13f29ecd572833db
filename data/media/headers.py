"""Headers of pictures: format, size and orientation from the first bytes of a member, without decoding it. Those of
clips are in `audio_headers`.

The index and the decoder both use this parser, so the size that the index promises is the size that the decoder yields.
Imports no torch: indexing runs in plain worker processes.

JPEG, PNG and HEIC have a parser of their own, the others are left to Pillow. With Pillow for all of them, to index a
picture takes 1.6 to 1.7 times the processor time, and 2.5 to 3.8 times where the file has a camera's EXIF or a profile
(benchmarks/image_headers_cpu2_2026-11-22.md).
"""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from data.media import orientation as orientations
from data.media.audio_headers import parse_audio_header
from data.media.heif_headers import is_heic, parse_heic_size
from data.media.iso_boxes import ReadAt

# Start-of-frame markers carry the size. C4, C8 and CC are tables and reserved words in the same range.
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_BARE = frozenset([0x01, *range(0xD0, 0xD8)])
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_TAIL = 1 << 16  # bytes at the end of a PNG in which metadata behind its pixels is looked for
_JPEG_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_MOST_PARTS = 1 << 16  # segments, chunks and fill bytes that are walked through: files of nothing else have millions
_PILLOW = ("WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000")
_MAGIC = (b"RIFF", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"II+\0", b"MM\0+", b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51")
"""What files of Pillow's formats begin with; TIFF has four beginnings, and JPEG 2000 two."""
_BRANDS = 256  # bytes of a file in which its kind is told
_AVIF = (b"avif", b"avis", b"mif1", b"msf1")


class ImageHeader(NamedTuple):
    """What a picture's header says. `height` and `width` are in pixels after `orientation` is applied."""

    format: str
    height: int
    width: int
    orientation: int  # of EXIF or XMP, 1 (upright) to 8; of TIFF and HEIC 1, since they are decoded upright


def parse_header(read: ReadAt, size: int) -> ImageHeader | None:
    """Header of a picture of `size` bytes, or None if there is none that we can read. Never raises for bad bytes."""
    window = _Window(read)
    magic = window.get(0, 12)
    if magic[:2] == b"\xff\xd8":
        return _jpeg(window)
    if magic[:8] == _PNG_SIGNATURE:
        return _png(window, read, size)
    if magic[4:8] == b"ftyp" and is_heic(window.get(0, _BRANDS)):
        found = parse_heic_size(read, size)
        return None if found is None else ImageHeader("HEIC", *found, 1)
    if magic.startswith(_MAGIC) or (magic[4:8] == b"ftyp" and magic[8:12] in _AVIF):
        return _pillow(read(0, size))
    return None


def parse_header_bytes(raw: bytes) -> ImageHeader | None:
    """`parse_header` for a member that is in memory."""
    return parse_header(lambda offset, length: raw[offset : offset + length], len(raw))


def parse_extent(kind: str, raw: bytes) -> tuple[int, int] | None:
    """What `data.outline.Media` needs to know of a picture (height, width) or a clip (samples per channel, samples per
    second); None without a header that we can read."""
    if kind == "audio":
        return parse_audio_header(raw)
    header = parse_header_bytes(raw)
    return None if header is None else (header.height, header.width)


class _Window:
    """Reads ahead by 4 KiB: one read is enough for most headers."""

    def __init__(self, read: ReadAt) -> None:
        self._read, self._start, self._bytes = read, 0, b""

    def get(self, offset: int, length: int) -> bytes:
        at = offset - self._start
        found = self._bytes[at : at + length] if at >= 0 else b""
        if len(found) == length:
            return found
        self._start, self._bytes = offset, self._read(offset, max(length, 4096))
        return self._bytes[:length]


def _jpeg(window: _Window) -> ImageHeader | None:
    offset = 2
    exif: tuple[int, int] | None = None  # where it is, and its length
    xmp: tuple[int, int] | None = None
    for _ in range(_MOST_PARTS):
        segment = window.get(offset, 9)  # marker, length; of a frame also precision, height and width
        if len(segment) < 2 or segment[0] != 0xFF:
            return None
        marker = segment[1]
        if marker == 0xFF:  # fill byte
            offset += 1
            continue
        if marker in _JPEG_BARE:
            offset += 2
            continue
        if marker in (0xD9, 0xDA) or len(segment) < 4:  # the picture ends or starts before any frame header
            return None
        length = segment[2] << 8 | segment[3]
        if marker in _JPEG_FRAMES:
            if len(segment) < 9:
                return None
            height, width = struct.unpack_from(">HH", segment, 5)
            found = orientations.of_exif(window.get(*exif)) if exif else None
            if found is None and xmp:
                found = orientations.of_xmp(window.get(*xmp))
            return _oriented("JPEG", height, width, orientations.first_of(found))
        if marker == 0xE1:
            if exif is None and window.get(offset + 4, 6) == b"Exif\0\0":
                exif = offset + 10, length - 8
            elif window.get(offset + 4, len(_JPEG_XMP)) == _JPEG_XMP:
                xmp = offset + 4 + len(_JPEG_XMP), length - 2 - len(_JPEG_XMP)
        offset += 2 + length
    return None


def _png(window: _Window, read: ReadAt, size: int) -> ImageHeader | None:
    first = window.get(8, 16)
    if len(first) < 16 or first[4:8] != b"IHDR":
        return None
    width, height = struct.unpack(">II", first[8:16])
    found = orientations.of_png(_first_chunks(window))
    if found is None:
        # Programs that change metadata put it behind the pixels.
        start = max(size - _PNG_TAIL, 33)
        found = orientations.of_png(orientations.last_png_chunks(read(start, max(size - start, 0))))
    return _oriented("PNG", height, width, orientations.first_of(found))


def _first_chunks(window: _Window) -> Iterator[tuple[bytes, bytes]]:
    """(name, content) of the metadata chunks in front of the pixels."""
    offset = 8
    for _ in range(_MOST_PARTS):
        chunk = window.get(offset, 8)
        if len(chunk) < 8:
            return
        length, name = struct.unpack(">I4s", chunk)
        if name in (b"IDAT", b"IEND"):
            return
        if name in (b"eXIf", b"tEXt", b"zTXt", b"iTXt"):
            yield name, window.get(offset + 8, min(length, 1 << 16))
        offset += 12 + length


def _pillow(raw: bytes) -> ImageHeader | None:
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of pictures that are merely large
            with Image.open(io.BytesIO(raw), formats=_PILLOW) as picture:
                if picture.format == "TIFF":
                    return _tiff(picture)
                exif, xmp = picture.info.get("exif", b""), picture.info.get("xmp", b"")
                orientation = orientations.first_of(orientations.of_exif(exif), orientations.of_xmp(xmp))
                return _oriented(picture.format or "", picture.height, picture.width, orientation)
    except Exception:  # Pillow raises many types for broken bytes; each means that there is no usable header
        return None


def _tiff(picture: Any) -> ImageHeader | None:
    """Pillow turns these upright itself, and has swapped the sides where the file's directory says so, but not yet
    where XMP alone does."""
    height, width = picture.height, picture.width
    if picture.tag_v2.get(orientations.TAG) is None and (orientations.of_xmp(picture.info.get("xmp", b"")) or 0) >= 5:
        height, width = width, height
    return _oriented("TIFF", height, width, 1)


def _oriented(name: str, height: int, width: int, orientation: int) -> ImageHeader | None:
    if not 0 < height < 1 << 31 or not 0 < width < 1 << 31:
        return None
    if orientation >= 5:
        height, width = width, height
    return ImageHeader(name, height, width, orientation)
