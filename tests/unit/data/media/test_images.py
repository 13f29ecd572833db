"""Image files of every format are upright, of the size in the index, and in the colours that they show."""

import io
import random
import struct
import sys

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms.v2 import functional as transforms

from data.errors import DecodeError, MissingLibrary
from data.media import decode
from data.media.decode import decode_image_file
from data.media.headers import parse_header_bytes
from tests.unit.data.helpers import encode_image


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF", "GIF", "BMP", "JPEG2000"])
@pytest.mark.parametrize("orientation", [None, *range(1, 9)])
def test_images_are_upright_and_of_the_indexed_size(kind, orientation):
    orientation = None if kind in ("GIF", "BMP", "JPEG2000") else orientation
    raw = encode_image(12, 31, kind, seed=2, orientation=orientation)
    image, header = decode_image_file(raw), parse_header_bytes(raw)
    assert image.dtype == torch.uint8 and tuple(image.shape) == (3, header.height, header.width)
    assert header.height == (31 if (orientation or 1) >= 5 else 12)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(raw))).convert("RGB"))
    assert np.array_equal(image.permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "I;16", "1"])
def test_other_colour_modes_become_rgb(mode):
    image = Image.fromarray(np.full((6, 5, 3), 200, dtype=np.uint8))
    if mode == "I;16":
        image = Image.fromarray(np.full((6, 5), 200 * 257, dtype=np.uint16))
    else:
        image = image.convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG" if mode == "CMYK" else "PNG")
    decoded = decode_image_file(buffer.getvalue())
    assert decoded.dtype == torch.uint8 and tuple(decoded.shape) == (3, 6, 5)
    assert abs(decoded.float().mean() - 200) < (60 if mode == "1" else 4)


@pytest.mark.parametrize("capability", ["DEFAULT", "AVX2"])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_images_are_decoded_and_resized_as_by_torchvision(interpolation, capability, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    for size in ((90, 61), (7, 33), (1, 1)):
        raw = torch.frombuffer(bytearray(encode_image(*size, seed=3)), dtype=torch.uint8)
        image = decode.decode_with_torchvision(raw)
        assert torch.equal(image, decode_image(raw, mode=ImageReadMode.RGB))
        for given in (image, image.contiguous()):
            for height, width in ((30, 40), (120, 60), (size[0], 50)):
                theirs = transforms.resize(given, [height, width], transforms.InterpolationMode(interpolation))
                ours = decode.resize_image(given, height, width, interpolation)
                assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()


def test_broken_images_are_decode_errors():
    good = encode_image(40, 40)
    for raw in (b"", b"text", good[: len(good) // 3], encode_image(40, 40, "PNG")[:200]):
        with pytest.raises(DecodeError, match=f"{len(raw)} bytes"):
            decode_image_file(raw)


def test_of_moving_images_the_first_frame_is_read():
    first, second = (Image.open(io.BytesIO(encode_image(9, 14, "PNG", value=value))) for value in (10, 240))
    for kind, options in (("WEBP", {"lossless": True}), ("GIF", {})):
        buffer = io.BytesIO()
        first.save(buffer, kind, save_all=True, append_images=[second], **options)
        image = decode_image_file(buffer.getvalue())
        assert tuple(image.shape) == (3, 9, 14) and (image == 10).all()


def save(image: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "JPEG2000"])
def test_shades_of_16_bits_keep_their_brightness(kind):
    grey = np.linspace(0, 65535, 48).astype(np.uint16).reshape(6, 8)
    image = decode_image_file(save(Image.fromarray(grey), kind)).numpy()
    assert np.abs(image - grey / 257).max() <= 1


def test_pixels_without_a_known_range_are_bad():
    with pytest.raises(DecodeError, match="no known range"):
        decode_image_file(save(Image.fromarray(np.ones((4, 4), dtype=np.float32)), "TIFF"))


def transparent() -> Image.Image:
    """A red square on a ground that is transparent and, below that, black; half transparent at its edge."""
    pixels = np.zeros((9, 14, 4), dtype=np.uint8)
    pixels[2:7, 4:9] = (200, 10, 10, 255)
    pixels[2:7, 9] = (200, 10, 10, 128)
    return Image.fromarray(pixels)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("WEBP", {"lossless": True, "exact": True}),
        ("TIFF", {}),
        ("AVIF", {"quality": 100}),
        ("JPEG2000", {}),
        ("WEBP", {"lossless": True, "save_all": True, "append_images": [Image.new("RGBA", (14, 9))]}),
    ],
)
def test_transparent_pixels_take_the_colour_behind(kind, options):
    raw = save(transparent(), kind, **options)
    white = decode_image_file(raw).permute(1, 2, 0).numpy().astype(int)
    assert white[0, 0].tolist() == [255] * 3 and np.abs(white[4, 6] - (200, 10, 10)).max() <= 8
    assert np.abs(white[4, 9] - np.array([227, 132, 132])).max() <= 20
    green = decode_image_file(raw, background=(0, 255, 0)).permute(1, 2, 0).numpy().astype(int)
    assert np.abs(green[0, 0] - (0, 255, 0)).max() <= 2
    without = decode_image_file(raw, background=None).permute(1, 2, 0).numpy()
    assert np.abs(without.astype(int) - np.asarray(Image.open(io.BytesIO(raw)).convert("RGB"))).max() <= 2
    assert without[0, 0].max() <= 8


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_a_colour_of_a_palette_that_is_transparent_takes_the_colour_behind(kind):
    image = Image.new("P", (6, 4), 1)
    image.putpalette([0, 0, 0, 9, 9, 200])
    image.putpixel((0, 0), 0)
    raw = save(image, kind, transparency=0)
    found = decode_image_file(raw)
    assert found[:, 0, 0].tolist() == [255] * 3 and found[:, 2, 2].tolist() == [9, 9, 200]


def heic(image: Image.Image, **options) -> bytes:
    pillow_heif = pytest.importorskip("pillow_heif")
    buffer = io.BytesIO()
    pillow_heif.from_pillow(image).save(buffer, quality=-1, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("angle", [0, 1, 2, 3])
def test_heic_is_upright_and_of_the_indexed_size(angle):
    pixels = np.fromfunction(lambda row, column, at: 4 * row + 2 * column + 9 * at, (31, 50, 3)).astype(np.uint8)
    raw = bytearray(heic(Image.fromarray(pixels)))
    plain = decode_image_file(bytes(raw))
    assert np.abs(plain.permute(1, 2, 0).numpy().astype(int) - pixels).mean() < 4
    if angle:  # in the place of a property that nothing needs, and behind what is cut out
        at = raw.index(b"pixi")
        raw[at : at + 5] = b"irot" + bytes([angle])
        at = raw.index(b"\x05\x84", raw.index(b"ipma"))
        raw[at : at + 2] = b"\x84\x05"
    header, image = parse_header_bytes(bytes(raw)), decode_image_file(bytes(raw))
    assert (header.height, header.width) == tuple(image.shape[1:]) == ((50, 31) if angle % 2 else (31, 50))
    assert torch.equal(image, torch.rot90(plain, angle, (1, 2)))
    for cut in (0, 20, 200, len(raw) - 1):
        assert parse_header_bytes(bytes(raw[:cut])) is None
        with pytest.raises(DecodeError):
            decode_image_file(bytes(raw[:cut]))


def test_heic_that_is_transparent_lies_or_is_damaged():
    raw = heic(transparent())
    assert (
        decode_image_file(raw)[:, 0, 0].tolist() == [255] * 3 and decode_image_file(raw, background=None)[0, 0, 0] <= 8
    )
    lie = raw.replace(struct.pack(">IIII", 14, 1, 9, 1), struct.pack(">IIII", 12, 1, 9, 1), 1)
    assert lie != raw and parse_header_bytes(lie).width == 12
    draw = random.Random(4)
    for _ in range(60):
        broken = bytearray(raw)
        for _ in range(draw.choice([1, 6, 60])):
            broken[draw.randrange(len(raw))] = draw.randrange(256)
        try:
            image, header = decode_image_file(bytes(broken)), parse_header_bytes(bytes(broken))
            assert tuple(image.shape[1:]) == (header.height, header.width)
        except DecodeError:
            pass


def test_without_its_library_heic_is_not_bad_and_names_the_extra(monkeypatch):
    raw = heic(Image.new("RGB", (20, 10)))
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    for read in (parse_header_bytes, decode_image_file):
        with pytest.raises(MissingLibrary, match=r"pip install 'mimo-train\[heic\]'"):
            read(raw)
