"""What stands behind a picture where it is transparent: `data.background`. Imports no torch."""

from __future__ import annotations

import re

from data.errors import DataError

READING = 3
"""Changes when the same file gives other pixels or samples than before."""

Colour = tuple[int, int, int]

WHITE: Colour = (255, 255, 255)
"""Red, green and blue of the default."""

_NAMED: dict[str, Colour | None] = {"white": WHITE, "black": (0, 0, 0), "grey": (128, 128, 128), "none": None}


def colour_of(text: str) -> Colour | None:
    """The colour of `data.background`; None for "none": transparency is left out.

    Raises:
        DataError: it is no colour; without the key.
    """
    if text in _NAMED:
        return _NAMED[text]
    if not re.fullmatch(r"#[0-9a-fA-F]{6}", text):
        raise DataError(f"must be {', '.join(_NAMED)} or #RRGGBB, is {text!r}")
    red, green, blue = bytes.fromhex(text[1:])
    return red, green, blue


def may_be_transparent(raw: bytes, kind: str) -> bool:
    """Whether a PNG or WebP file may have transparent pixels, by its header."""
    if kind == "PNG":
        # Grey or colour with alpha; or a transparent colour, in a chunk in front of the pixels.
        return raw[25:26] in (b"\4", b"\6") or b"tRNS" in raw[: max(raw.find(b"IDAT"), 0)]
    if raw[12:16] == b"VP8X":
        return bool(raw[20] & 0x10)
    # Lossless: after a byte, width and height in 14 bits each, and whether alpha is used.
    return raw[12:16] == b"VP8L" and bool(int.from_bytes(raw[21:25], "little") >> 28 & 1)
