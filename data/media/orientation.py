"""Orientation of a picture, 1 (upright) to 8, from its metadata: EXIF, and XMP where EXIF says nothing, as Pillow's
`exif_transpose` has it. Imports neither torch nor Pillow."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator

TAG = 0x0112
"""Of the orientation, in EXIF and TIFF."""
_TYPES = {3: "H", 4: "I", 6: "b", 8: "h", 9: "i"}
"""Types of EXIF values that hold one whole number, as `struct` names them."""
_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_PNG_TEXTS = (b"tEXt", b"zTXt", b"iTXt")
_LARGEST_TEXT = 1 << 20  # bytes; a text may be compressed


def first_of(*found: int | None) -> int:
    """The first orientation that there is; 1 if none, or if it is no orientation."""
    value = next((one for one in found if one is not None), 1)
    return value if 1 <= value <= 8 else 1


def of_exif(tiff: bytes) -> int | None:
    """The value in the first directory of an EXIF block; None when absent or damaged."""
    tiff = tiff.removeprefix(b"Exif\0\0")
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None or len(tiff) < 8:
        return None
    (directory,) = struct.unpack(order + "I", tiff[4:8])
    if directory + 2 > len(tiff):
        return None
    (count,) = struct.unpack_from(order + "H", tiff, directory)
    for entry in range(directory + 2, min(directory + 2 + 12 * count, len(tiff) - 11), 12):
        tag, kind = struct.unpack_from(order + "HH", tiff, entry)
        if tag == TAG and kind in _TYPES:
            return struct.unpack_from(order + _TYPES[kind], tiff, entry + 8)[0]
    return None


def of_xmp(packet: bytes) -> int | None:
    """The value in an XMP packet; None when absent."""
    found = _XMP.search(packet)
    return int(found[1]) if found else None


def of_png(chunks: Iterator[tuple[bytes, bytes]]) -> int | None:
    """The value that (name, content) of PNG chunks give: eXIf, else EXIF as text (ImageMagick), else XMP."""
    exif: int | None = None
    profile: int | None = None
    xmp: int | None = None
    for name, content in chunks:
        if name == b"eXIf":
            exif = of_exif(content)
        elif name in _PNG_TEXTS:
            keyword, text = _text(name, content)
            if keyword == b"Raw profile type exif":
                profile = of_exif(_from_hex(text))
            elif keyword == b"XML:com.adobe.xmp":
                xmp = of_xmp(text)
    return next((one for one in (exif, profile, xmp) if one is not None), None)


def last_png_chunks(tail: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(name, content) of the metadata chunks behind the pixels of a PNG, in the order of the file.

    tail: the end of the file, which may begin inside a chunk: a chunk is one from which lengths lead to the end mark.
    """
    starts = sorted(
        at - 4
        for name in (b"eXIf", *_PNG_TEXTS)
        for at in (found.start() for found in re.finditer(name, tail))
        if at >= 4
    )
    dead: set[int] = set()  # places from which no lengths lead to the end mark
    for start in starts:
        chunks: list[tuple[bytes, bytes]] = []
        offset = start
        while offset not in dead and len(head := tail[offset : offset + 8]) == 8:
            dead.add(offset)
            length, name = struct.unpack(">I4s", head)
            if name == b"IEND":
                yield from chunks
                return
            chunks.append((name, tail[offset + 8 : offset + 8 + length]))
            offset += 12 + length


def _text(name: bytes, content: bytes) -> tuple[bytes, bytes]:
    """(keyword, text) of a PNG's text chunk; the text is empty where it is damaged."""
    keyword, _, text = content.partition(b"\0")
    compressed = name == b"zTXt"
    if compressed:
        text = text[1:]  # the method
    elif name == b"iTXt":
        compressed = text[:1] == b"\1"
        text = text[2:].split(b"\0", 2)[-1]  # behind the language and the translated keyword
    if compressed:
        try:
            text = zlib.decompressobj().decompress(text, _LARGEST_TEXT)
        except zlib.error:
            text = b""
    return keyword, text


def _from_hex(text: bytes) -> bytes:
    """The bytes of a raw profile: an empty line, its name and its length, then hexadecimal digits."""
    try:
        return bytes.fromhex(b"".join(text.split(b"\n")[3:]).decode("ascii"))
    except ValueError:
        return b""
