"""Headers of images whose bytes are damaged: the parser never raises and always ends, and what it promises is what
the decoder yields, or the image is bad."""

import io
import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from data.errors import DecodeError, ReadError
from data.media.decode import decode_image_file
from data.media.headers import parse_header, parse_header_bytes, parse_video_header
from tests.unit.data.helpers import encode_image
from tests.videos import make_video

IMAGES = [
    encode_image(12, 31, kind, seed=3, orientation=orientation)
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP")
    for orientation in ((None, 6) if kind in ("JPEG", "PNG", "WEBP") else (None,))
]
MOST_PIXELS = 1 << 20
"""A damaged header may promise gigabytes, which no test should ask the decoder for."""


@st.composite
def damaged(draw) -> bytes:
    """An image with some bytes changed, put in, or cut off; mostly near its header, where the sizes are."""
    raw = bytearray(draw(st.sampled_from(IMAGES)))
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
def test_a_header_is_found_or_not_and_what_it_promises_is_decoded(raw):
    reads = []

    def read(length: int, offset: int) -> bytes:
        reads.append(offset)
        return raw[offset : offset + length] if offset < len(raw) else b""

    header = parse_header(read, len(raw))
    assert len(reads) <= len(raw) + 2, "each read goes on in the file"
    assert header == parse_header_bytes(raw)
    if header is not None:
        assert header.height > 0 and header.width > 0 and 1 <= header.orientation <= 8
    if header is None or header.height * header.width <= MOST_PIXELS:
        try:
            image = decode_image_file(raw)
        except DecodeError:
            return
        assert header is not None and tuple(image.shape) == (3, header.height, header.width)


@pytest.mark.parametrize(("kind", "mark", "behind"), [("JPEG", b"\xff\xc0\x00\x11\x08", 2), ("PNG", b"IHDR", 4)])
def test_a_image_without_any_pixel_has_no_header(kind, mark, behind):
    raw = encode_image(12, 31, kind)
    at = raw.index(mark) + len(mark)
    assert parse_header_bytes(raw) is not None
    assert parse_header_bytes(raw[:at] + bytes(behind) + raw[at + behind :]) is None


@pytest.mark.parametrize(
    "raw",
    [b"\xff\xd8" + b"\xff" * 3_000_000, b"\xff\xd8" + b"\xff\x01" * 10_000, b"\x89PNG\r\n\x1a\n" + bytes(3_000_000)],
)
def test_a_long_run_of_marker_bytes_ends(raw):
    assert parse_header_bytes(raw) is None


def test_header_behind_large_segments_and_of_broken_files():
    plain = encode_image(7, 9)
    padded = plain[:2] + (b"\xff\xe2\xff\xff" + b"x" * 0xFFFD) * 3 + plain[2:]
    assert parse_header_bytes(padded)[1:3] == (7, 9)
    for kind in ("GIF", "BMP"):
        assert parse_header_bytes(encode_image(7, 9, kind))[1:3] == (7, 9)
    for raw in (b"", b"\xff\xd8", b"\xff\xd8\xff\xd9", b"hello", b"RIFFxxxxWEBP", b"\x89PNG\r\n\x1a\n", b"GIF89a"):
        assert parse_header_bytes(raw) is None
    for cut in range(len(plain)):  # never an exception, whatever is missing
        parse_header_bytes(plain[:cut])


# Orientation


def tiff(value: int, order: bytes = b"II", kind: int = 3, size: str = "H") -> bytes:
    """An EXIF block with an orientation alone."""
    mark = "<" if order == b"II" else ">"
    entry = struct.pack(mark + "HHHI", 1, 0x0112, kind, 1) + struct.pack(mark + size, value).ljust(4, b"\0")
    return order + struct.pack(mark + "HI", 42, 8) + entry + bytes(4)


def xmp(value: object, form: str = 'tiff:Orientation="{}"/>') -> bytes:
    return b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description ' + form.format(value).encode() + b"</x:xmpmeta>"


def jpeg(*blocks: bytes) -> bytes:
    raw = encode_image(12, 31)
    return raw[:2] + b"".join(b"\xff\xe1" + struct.pack(">H", len(one) + 2) + one for one in blocks) + raw[2:]


def png(*chunks: tuple[bytes, bytes], behind: bool = False) -> bytes:
    raw = encode_image(12, 31, "PNG")
    own = b"".join(
        struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        for name, content in chunks
    )
    at = len(raw) - 12 if behind else 33
    return raw[:at] + own + raw[at:]


EXIF, XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"
PROFILE = b"\nexif\n%8d\n%s\n" % (len(EXIF + tiff(6)), (EXIF + tiff(6)).hex().encode())
ORIENTED = {
    **{
        f"{order.decode()} type {kind}": jpeg(EXIF + tiff(6, order, kind, size))
        for order in (b"II", b"MM")
        for kind, size in ((3, "H"), (4, "I"), (9, "i"))
    },
    "no orientation": jpeg(EXIF + tiff(9)),
    "xmp": jpeg(XMP + xmp(8)),
    "xmp element": jpeg(XMP + xmp(5, "><tiff:Orientation>{}</tiff:Orientation>")),
    "xmp without": jpeg(XMP + xmp("x")),
    "exif before xmp": jpeg(XMP + xmp(6), EXIF + tiff(3)),
    "png": png((b"eXIf", tiff(6))),
    "png, behind": png((b"eXIf", tiff(8)), behind=True),
    "png, behind others": png((b"tEXt", b"Comment\0eXIf"), (b"eXIf", tiff(7)), behind=True),
    "png, profile": png((b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(PROFILE))),
    "png, profile behind": png((b"tEXt", b"Raw profile type exif\0" + PROFILE), behind=True),
    "png, xmp": png((b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp(6)), behind=True),
    "png, xmp zipped": png((b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(xmp(6)))),
    "png, exif before xmp": png((b"eXIf", tiff(1)), (b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp(6))),
}


@pytest.mark.parametrize("raw", ORIENTED.values(), ids=ORIENTED)
def test_orientation_is_that_of_pillow(raw):
    size = ImageOps.exif_transpose(Image.open(io.BytesIO(raw))).size
    header = parse_header_bytes(raw)
    assert (header.width, header.height) == size
    assert decode_image_file(raw).shape == (3, size[1], size[0])


def test_orientations_are_told_apart():
    found = [parse_header_bytes(raw).orientation for raw in ORIENTED.values()]
    assert found == [6] * 6 + [1, 8, 5, 1, 3, 6, 8, 7, 6, 6, 6, 6, 1]


def test_damaged_profiles_say_nothing():
    for chunk in ((b"zTXt", b"Raw profile type exif\0\0nothing"), (b"tEXt", b"Raw profile type exif\0a\nb\nc\nd")):
        assert parse_header_bytes(png(chunk))[1:] == (12, 31, 1)


def test_xmp_of_a_webp_counts():
    buffer = io.BytesIO()
    Image.new("RGB", (31, 12)).save(buffer, "WEBP", xmp=xmp(6))
    assert parse_header_bytes(buffer.getvalue())[1:] == (31, 12, 6)


@pytest.mark.parametrize("name", ["png", "webp", "mp4", "webm"])
def test_a_storage_error_is_not_a_damaged_file(name):
    """An index would keep zeros for it."""
    if name in ("png", "webp"):
        buffer = io.BytesIO()
        Image.effect_noise((600, 400), 90).save(buffer, name.upper())
        raw, parse = buffer.getvalue(), parse_header
    else:
        pytest.importorskip("av")
        raw, parse = make_video(name, "libvpx" if name == "webm" else "mpeg4", seed=1), parse_video_header

    def parsed(reads):
        """Parse, with an error at one of the reads, and return their number."""
        ranges = []

        def read(length, at):
            ranges.append(at)
            if len(ranges) == reads:
                raise ReadError("the disk is gone")
            return raw[at : at + length]

        assert parse(read, len(raw)) is not None
        return len(ranges)

    for reads in range(parsed(0)):
        with pytest.raises(ReadError, match="the disk is gone"):
            parsed(reads + 1)
