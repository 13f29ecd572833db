"""Headers: format, size and EXIF orientation of a picture from the first bytes of a member, length and rate of a clip,
without decoding it.

The index and the decoder both use this parser, so the size that the index promises is the size that the decoder yields.
Imports no torch: indexing runs in plain worker processes.

JPEG and PNG have a parser of their own, WebP, GIF and BMP are left to Pillow. With Pillow for all of them, to index a
picture takes 1.6 to 1.7 times the processor time, and 2.5 to 3.8 times where the file has a camera's EXIF or a profile
(benchmarks/image_headers_cpu2_2026-11-22.md).
"""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Callable
from typing import NamedTuple

ReadAt = Callable[[int, int], bytes]
"""(offset within the member, length) -> bytes, shorter at the member's end."""

# Start-of-frame markers carry the size. C4, C8 and CC are tables and reserved words in the same range.
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_BARE = frozenset([0x01, *range(0xD0, 0xD8)])
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class ImageHeader(NamedTuple):
    """What a picture's header says. `height` and `width` are in pixels after `orientation` is applied."""

    format: str
    height: int
    width: int
    orientation: int  # EXIF value, 1 (upright) to 8


def parse_header(read: ReadAt, size: int) -> ImageHeader | None:
    """Header of a picture of `size` bytes, or None if there is none that we can read. Never raises for bad bytes."""
    window = _Window(read)
    magic = window.get(0, 12)
    if magic[:2] == b"\xff\xd8":
        return _jpeg(window)
    if magic[:8] == _PNG_SIGNATURE:
        return _png(window)
    if magic[:4] == b"RIFF" or magic[:4] == b"GIF8" or magic[:2] == b"BM":
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


def parse_audio_header(raw: bytes) -> tuple[int, int] | None:
    """(samples per channel, samples per second) of a whole audio file, or None. Never raises for bad bytes."""
    import soundfile

    try:
        info = soundfile.info(io.BytesIO(raw))
    except (soundfile.SoundFileError, RuntimeError):
        return None
    return (int(info.frames), int(info.samplerate)) if info.frames > 0 and info.samplerate > 0 else None


class _Window:
    """Reads ahead by 4 KiB: one read is enough for most headers."""

    def __init__(self, read: ReadAt) -> None:
        self._read, self._start, self._bytes = read, 0, b""

    def get(self, offset: int, length: int) -> bytes:
        at = offset - self._start
        if at < 0 or at + length > len(self._bytes):
            self._start, self._bytes, at = offset, self._read(offset, max(length, 4096)), 0
        return self._bytes[at : at + length]


def _jpeg(window: _Window) -> ImageHeader | None:
    offset, orientation = 2, 1
    found_exif = False
    while True:
        marker = window.get(offset, 2)
        if len(marker) < 2 or marker[0] != 0xFF:
            return None
        if marker[1] == 0xFF:  # fill byte
            offset += 1
            continue
        if marker[1] in _JPEG_BARE:
            offset += 2
            continue
        segment = window.get(offset + 2, 2)
        if marker[1] in (0xD9, 0xDA) or len(segment) < 2:  # the picture ends or starts before any frame header
            return None
        length = int.from_bytes(segment, "big")
        if marker[1] in _JPEG_FRAMES:
            frame = window.get(offset + 4, 5)
            if len(frame) < 5:
                return None
            height, width = struct.unpack(">xHH", frame)
            return _oriented("JPEG", height, width, orientation)
        if marker[1] == 0xE1 and not found_exif and window.get(offset + 4, 6) == b"Exif\0\0":
            orientation, found_exif = _exif_orientation(window.get(offset + 10, length - 8)), True
        offset += 2 + length


def _png(window: _Window) -> ImageHeader | None:
    first = window.get(8, 16)
    if len(first) < 16 or first[4:8] != b"IHDR":
        return None
    width, height = struct.unpack(">II", first[8:16])
    offset, orientation = 8, 1
    while len(chunk := window.get(offset, 8)) == 8:
        length, name = struct.unpack(">I4s", chunk)
        if name == b"eXIf":
            orientation = _exif_orientation(window.get(offset + 8, min(length, 1 << 16)))
        if name in (b"eXIf", b"IDAT", b"IEND"):
            break
        offset += 12 + length
    return _oriented("PNG", height, width, orientation)


def _pillow(raw: bytes) -> ImageHeader | None:
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of pictures that are merely large
            with Image.open(io.BytesIO(raw), formats=["WEBP", "GIF", "BMP"]) as picture:
                exif = picture.info.get("exif", b"")
                orientation = _exif_orientation(exif.removeprefix(b"Exif\0\0"))
                return _oriented(picture.format or "", picture.height, picture.width, orientation)
    except Exception:  # Pillow raises many types for broken bytes; each means that there is no usable header
        return None


def _oriented(name: str, height: int, width: int, orientation: int) -> ImageHeader | None:
    if not 0 < height < 1 << 31 or not 0 < width < 1 << 31:
        return None
    if orientation >= 5:
        height, width = width, height
    return ImageHeader(name, height, width, orientation)


def _exif_orientation(tiff: bytes) -> int:
    """Orientation (1 to 8) in the first directory of an EXIF block; 1 when absent or damaged."""
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None or len(tiff) < 8:
        return 1
    (directory,) = struct.unpack(order + "I", tiff[4:8])
    if directory + 2 > len(tiff):
        return 1
    (count,) = struct.unpack_from(order + "H", tiff, directory)
    for entry in range(directory + 2, min(directory + 2 + 12 * count, len(tiff) - 11), 12):
        tag, _, _, value = struct.unpack_from(order + "HHIH", tiff, entry)
        if tag == 0x0112:
            return value if 1 <= value <= 8 else 1
    return 1
