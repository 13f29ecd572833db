"""Files as people have them: every subtype of sound, formats of pictures, transparency."""

import io
import random
import struct
import sys

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image, ImageOps

from data.errors import DecodeError, MissingLibrary
from data.media.audio_files import parse_audio_header
from data.media.decode import decode_audio, decode_image_file
from data.media.headers import parse_header_bytes
from data.records.members import AUDIO
from tests.unit.data.helpers import encode_picture

STEPS = {"PCM_S8": 1 / 64, "PCM_U8": 1 / 64, "ULAW": 0.02, "ALAW": 0.02, "DPCM_8": 0.02}
LOSSY = ("VORBIS", "OPUS", "MPEG_LAYER_III", "MS_ADPCM", "IMA_ADPCM", "GSM610", "NMS_ADPCM_16", "NMS_ADPCM_24")
LOSSY += ("NMS_ADPCM_32", "G721_32", "G723_24", "G723_40")
REFUSED = {"SDS": "", "XI": "", "AIFF": "DWVW"}
"""What is not read right: of a format, subtypes that begin so."""
UNWRITTEN = [("AIFF", "DWVW_12"), ("WAV", "MPEG_LAYER_III"), ("MP3", "MPEG_LAYER_I"), ("MP3", "MPEG_LAYER_II")]
"""That libsndfile names and does not write."""
NO_HEADER = ("RAW", "SD2")
"""Formats that say nowhere in the file what they are."""
TONE = 0.5 * np.sin(np.arange(8000) * (2 * np.pi * 440 / 8000))


def subtypes():
    return [
        pytest.param(kind, subtype, id=f"{kind}-{subtype}")
        for kind in soundfile.available_formats()
        for subtype in soundfile.available_subtypes(kind)
        if soundfile.check_format(kind, subtype) and (kind, subtype) not in UNWRITTEN
    ]


def sound(wave, kind="WAV", subtype=None, rate=8000) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, wave, rate, format=kind, subtype=subtype)
    return buffer.getvalue()


@pytest.mark.parametrize(("kind", "subtype"), subtypes())
def test_every_subtype_of_every_format_is_read_as_it_was_written_or_refused(kind, subtype, tmp_path):
    # A file: some are not written into memory.
    soundfile.write(tmp_path / "file", TONE, 8000, format=kind, subtype=subtype)
    raw = (tmp_path / "file").read_bytes()
    if kind in NO_HEADER:
        assert parse_audio_header(raw) is None
        with pytest.raises(DecodeError, match="bytes of audio: Format not recognised"):
            decode_audio(raw, 8000)
        return
    if kind in REFUSED and subtype.startswith(REFUSED[kind]):
        with pytest.raises(DecodeError, match=f"{kind} with {subtype} is not read right by libsndfile: convert it"):
            decode_audio(raw, 8000)
        return
    frames, rate = parse_audio_header(raw)
    wave = decode_audio(raw, 8000).numpy()
    assert rate == 8000 and len(wave) == frames and 8000 <= frames < 11000
    if subtype in LOSSY:
        # Codecs delay and shape: what matters is that the tone is there, as loud as it was.
        assert abs(np.sqrt(np.mean(wave[1000:7000] ** 2)) - 0.5 / np.sqrt(2)) < 0.05
        assert np.argmax(np.abs(np.fft.rfft(wave[:8000]))) == 440
    else:
        assert np.abs(wave[:8000] - TONE).max() <= STEPS.get(subtype, 1 / 16000)


def test_a_subtype_that_libsndfile_does_not_write_is_refused_by_name():
    raw = bytearray(sound(TONE, "AIFF", "DWVW_16"))
    at = raw.index(b"COMM") + 14
    raw[at : at + 2] = struct.pack(">H", 12)
    with pytest.raises(DecodeError, match="AIFF with DWVW_12 is not read right"):
        decode_audio(bytes(raw), 8000)


@pytest.mark.parametrize(("kind", "subtype"), [("SDS", "PCM_24"), ("XI", "DPCM_16"), ("AIFF", "DWVW_16")])
def test_what_is_refused_is_not_read_right_still(kind, subtype, tmp_path):
    """Else it need not be refused any more."""
    soundfile.write(tmp_path / "file", TONE, 8000, format=kind, subtype=subtype)
    try:
        with soundfile.SoundFile(io.BytesIO((tmp_path / "file").read_bytes())) as file:
            wave = file.read(8000)
            assert (file.samplerate == 44100) == (kind == "XI")  # which says nothing of its rate
    except soundfile.LibsndfileError:
        return
    assert kind == "XI" or len(wave) != len(TONE) or np.abs(wave - TONE).max() > 0.1


def test_whole_numbers_and_floats_of_one_recording_are_equal():
    whole = np.round(TONE * 32768).astype(np.int16)
    waves = [decode_audio(sound(whole, *form), 8000) for form in (("WAV",), ("FLAC",), ("AIFF",), ("CAF",))]
    waves += [decode_audio(sound(whole / 32768, "WAV", form), 8000) for form in ("PCM_24", "PCM_32", "FLOAT", "DOUBLE")]
    assert all(torch.equal(wave, waves[0]) for wave in waves)


def test_floats_above_one_stay_and_those_that_are_no_number_are_bad():
    assert decode_audio(sound(TONE * 3, "WAV", "FLOAT"), 8000).max() > 1.4
    for value in (np.nan, np.inf, 1e300):
        broken = TONE.copy()
        broken[7] = value
        with pytest.raises(DecodeError, match="not finite"):
            decode_audio(sound(broken, "WAV", "DOUBLE"), 8000)


@pytest.mark.parametrize("kind", ["WAV", "RF64", "W64", "AIFF", "AU", "CAF", "OGG", "FLAC"])
def test_a_clip_that_is_cut_off_is_bad_in_every_format(kind):
    raw = sound(TONE, kind)
    assert parse_audio_header(raw)[0] == 8000
    for cut in (40, len(raw) // 2):
        with pytest.raises(DecodeError):
            decode_audio(raw[:-cut], 8000)
        assert kind == "FLAC" or parse_audio_header(raw[:-cut]) is None


@pytest.mark.parametrize(
    ("kind", "orientation"),
    [("JPEG2000", None), *((kind, value) for kind in ("TIFF", "AVIF") for value in (None, 1, 3, 6, 8))],
)
def test_formats_of_pillow_are_upright_and_of_the_indexed_size(kind, orientation):
    raw = encode_picture(12, 31, kind, seed=2, orientation=orientation)
    header, picture = parse_header_bytes(raw), decode_image_file(raw)
    assert tuple(picture.shape) == (3, header.height, header.width)
    assert header.height == (31 if (orientation or 1) >= 5 else 12)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(raw))).convert("RGB"))
    assert np.array_equal(picture.permute(1, 2, 0).numpy(), expected)


def save(picture: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "JPEG2000"])
def test_shades_of_16_bits_keep_their_brightness(kind):
    grey = np.linspace(0, 65535, 48).astype(np.uint16).reshape(6, 8)
    picture = decode_image_file(save(Image.fromarray(grey), kind)).numpy()
    assert np.abs(picture - grey / 257).max() <= 1


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
    picture = Image.new("P", (6, 4), 1)
    picture.putpalette([0, 0, 0, 9, 9, 200])
    picture.putpixel((0, 0), 0)
    raw = save(picture, kind, transparency=0)
    found = decode_image_file(raw)
    assert found[:, 0, 0].tolist() == [255] * 3 and found[:, 2, 2].tolist() == [9, 9, 200]


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
def test_without_transparency_pixels_are_those_of_before(kind, mode):
    picture = Image.open(io.BytesIO(encode_picture(20, 30, "PNG", seed=5))).convert(mode)
    raw = save(picture, kind, **({"lossless": True} if kind == "WEBP" else {}))
    assert torch.equal(decode_image_file(raw), decode_image_file(raw, background=None))
    assert np.array_equal(decode_image_file(raw).permute(1, 2, 0), np.asarray(picture.convert("RGB")))


def test_extensions_of_sound_are_those_that_are_tested():
    assert AUDIO >= {"wav", "flac", "ogg", "mp3", "aiff", "au", "caf", "w64", "rf64"}


def heic(picture: Image.Image, **options) -> bytes:
    pillow_heif = pytest.importorskip("pillow_heif")
    buffer = io.BytesIO()
    pillow_heif.from_pillow(picture).save(buffer, quality=-1, **options)
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
    header, picture = parse_header_bytes(bytes(raw)), decode_image_file(bytes(raw))
    assert (header.height, header.width) == tuple(picture.shape[1:]) == ((50, 31) if angle % 2 else (31, 50))
    assert torch.equal(picture, torch.rot90(plain, angle, (1, 2)))
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
            picture, header = decode_image_file(bytes(broken)), parse_header_bytes(bytes(broken))
            assert tuple(picture.shape[1:]) == (header.height, header.width)
        except DecodeError:
            pass


def test_without_its_library_heic_is_not_bad_and_names_the_extra(monkeypatch):
    raw = heic(Image.new("RGB", (20, 10)))
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    for read in (parse_header_bytes, decode_image_file):
        with pytest.raises(MissingLibrary, match=r"pip install 'mimo-train\[heic\]'"):
            read(raw)
