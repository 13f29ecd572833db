"""Headers of pictures whose bytes are damaged: the parser never raises and always ends, and what it promises is what
the decoder yields, or the picture is bad."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from data.errors import DecodeError
from data.media.decode import decode_picture
from data.media.headers import parse_header, parse_header_bytes
from tests.unit.data.helpers import encode_picture

PICTURES = [
    encode_picture(12, 31, kind, seed=3, orientation=orientation)
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP")
    for orientation in ((None, 6) if kind in ("JPEG", "PNG", "WEBP") else (None,))
]
MOST_PIXELS = 1 << 20
"""A damaged header may promise gigabytes, which no test should ask the decoder for."""


@st.composite
def damaged(draw) -> bytes:
    """A picture with some bytes changed, put in, or cut off; mostly near its header, where the sizes are."""
    raw = bytearray(draw(st.sampled_from(PICTURES)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.one_of(st.integers(0, 80), st.integers(0, len(raw) - 1))) % max(len(raw), 1)
        how = draw(st.sampled_from(["change", "insert", "cut out"]))
        if how == "change":
            raw[at] = draw(st.sampled_from([0x00, 0x01, 0xC0, 0xD9, 0xDA, 0xE1, 0xFF, raw[at] ^ 1, raw[at] ^ 0x80]))
        elif how == "insert":
            raw[at:at] = draw(st.binary(min_size=1, max_size=12))
        else:
            del raw[at : at + draw(st.integers(1, 12))]
    return bytes(raw[: draw(st.one_of(st.just(len(raw)), st.integers(0, len(raw))))])


@given(raw=damaged())
@settings(max_examples=400)
def test_a_header_is_found_or_not_whatever_the_bytes_are(raw):
    reads = []

    def read(offset: int, length: int) -> bytes:
        reads.append(offset)
        return raw[offset : offset + length] if offset < len(raw) else b""

    header = parse_header(read, len(raw))
    assert len(reads) <= len(raw) + 2, "each read goes on in the file"
    assert header == parse_header_bytes(raw)
    if header is not None:
        assert header.height > 0 and header.width > 0 and 1 <= header.orientation <= 8


@given(raw=damaged())
@settings(max_examples=400)
def test_a_picture_has_the_size_that_its_header_promises_or_is_bad(raw):
    header = parse_header_bytes(raw)
    assume(header is None or header.height * header.width <= MOST_PIXELS)
    try:
        picture = decode_picture(raw)
    except DecodeError:
        return
    assert header is not None and tuple(picture.shape) == (3, header.height, header.width)


@pytest.mark.parametrize("raw", PICTURES)
def test_no_end_and_no_changed_byte_is_an_error(raw):
    for at in range(len(raw)):
        parse_header_bytes(raw[:at])
        for byte in (0x00, 0xFF, raw[at] ^ 0x01):
            parse_header_bytes(raw[:at] + bytes([byte]) + raw[at + 1 :])


@pytest.mark.parametrize(("kind", "mark", "behind"), [("JPEG", b"\xff\xc0\x00\x11\x08", 2), ("PNG", b"IHDR", 4)])
def test_a_picture_without_any_pixel_has_no_header(kind, mark, behind):
    raw = encode_picture(12, 31, kind)
    at = raw.index(mark) + len(mark)
    assert parse_header_bytes(raw) is not None
    assert parse_header_bytes(raw[:at] + bytes(behind) + raw[at + behind :]) is None


@pytest.mark.parametrize("raw", [b"\xff\xd8" + b"\xff" * 20_000, b"\xff\xd8" + b"\xff\x01" * 10_000])
def test_a_long_run_of_marker_bytes_ends(raw):
    assert parse_header_bytes(raw) is None


@pytest.mark.parametrize("raw", PICTURES)
def test_what_is_whole_is_read(raw):
    header = parse_header_bytes(raw)
    assert decode_picture(raw).shape == (3, header.height, header.width)
