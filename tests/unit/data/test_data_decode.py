import io
import os
import threading

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image, ImageOps
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms.v2 import functional as transforms

from data.errors import DecodeError, ReadError, ShardError
from data.media import decode
from data.media.audio_files import parse_audio_header
from data.media.decode import decode_audio, decode_image_file, decode_resized
from data.media.headers import parse_header_bytes
from data.storage.files import ShardVersion
from data.storage.reader import ShardReader
from tests.unit.data.helpers import encode_picture


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_upright_and_of_the_indexed_size(kind, orientation):
    exif = orientation if kind in ("JPEG", "PNG", "WEBP") else None
    raw = encode_picture(12, 31, kind, orientation=exif)
    picture = decode_image_file(raw)
    header = parse_header_bytes(raw)
    assert picture.dtype == torch.uint8 and tuple(picture.shape) == (3, header.height, header.width)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(raw))).convert("RGB"))
    assert np.abs(picture.permute(1, 2, 0).numpy().astype(int) - expected).max() <= 2
    if kind in ("JPEG", "PNG"):
        data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        assert torch.equal(picture, decode_image(data, mode=ImageReadMode.RGB, apply_exif_orientation=True))


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "I;16", "1"])
def test_other_colour_modes_become_rgb(mode):
    picture = Image.fromarray(np.full((6, 5, 3), 200, dtype=np.uint8))
    if mode == "I;16":
        picture = Image.fromarray(np.full((6, 5), 200 * 257, dtype=np.uint16))
    else:
        picture = picture.convert(mode)
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG" if mode == "CMYK" else "PNG")
    decoded = decode_image_file(buffer.getvalue())
    assert decoded.dtype == torch.uint8 and tuple(decoded.shape) == (3, 6, 5)
    assert abs(decoded.float().mean() - 200) < (60 if mode == "1" else 4)


def test_resize_is_bicubic_with_antialiasing():
    raw = encode_picture(90, 60, "PNG", seed=3)
    ours = decode_resized(raw, 30, 40)
    pillow = np.asarray(Image.open(io.BytesIO(raw)).resize((40, 30), Image.Resampling.BICUBIC))
    assert tuple(ours.shape) == (3, 30, 40) and ours.is_contiguous()
    assert np.abs(ours.permute(1, 2, 0).numpy().astype(int) - pillow).max() <= 3
    assert torch.equal(decode_resized(raw, 90, 60), decode_image_file(raw))


@pytest.mark.parametrize("capability", ["DEFAULT", "AVX2"])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_pictures_are_decoded_and_resized_as_by_torchvision(interpolation, capability, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    for kind, size in (("JPEG", (90, 61)), ("PNG", (7, 33)), ("PNG", (1, 1))):
        raw = torch.frombuffer(bytearray(encode_picture(*size, kind, seed=3)), dtype=torch.uint8)
        picture = decode.decode_with_torchvision(raw)
        assert torch.equal(picture, decode_image(raw, mode=ImageReadMode.RGB))
        for given in (picture, picture.contiguous()):
            for height, width in ((30, 40), (120, 60), (size[0], 50)):
                theirs = transforms.resize(given, [height, width], transforms.InterpolationMode(interpolation))
                ours = decode.resize_image(given, height, width, interpolation)
                assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()


def test_sixteen_bits_become_eight_as_by_torchvision():
    shades = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    buffer = io.BytesIO()
    Image.fromarray(shades).save(buffer, "PNG")
    raw = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    theirs = transforms.to_dtype(decode.decode_with_torchvision(raw), torch.uint8, scale=True)
    assert torch.equal(decode_image_file(buffer.getvalue()), theirs)


def test_broken_pictures_are_decode_errors():
    good = encode_picture(40, 40)
    for raw in (b"", b"text", good[: len(good) // 3], encode_picture(40, 40, "PNG")[:200]):
        with pytest.raises(DecodeError, match=f"{len(raw)} bytes"):
            decode_image_file(raw)


def test_audio_is_mono_at_the_rate_asked_for():
    seconds = np.arange(8000) / 8000
    left = (np.sin(2 * np.pi * 440 * seconds) * 20000).astype(np.int16)
    files = {}
    for kind in ("WAV", "FLAC"):
        buffer = io.BytesIO()
        soundfile.write(buffer, np.stack([left, np.zeros_like(left)], 1), 8000, format=kind, subtype="PCM_16")
        files[kind] = decode_audio(buffer.getvalue(), 8000)
    assert torch.equal(files["WAV"], files["FLAC"])
    assert torch.equal(files["WAV"], torch.from_numpy(left.astype(np.float32)) / 65536)
    doubled = decode_audio(buffer.getvalue(), 16000)
    expected = np.sin(2 * np.pi * 440 * np.arange(16000) / 16000) * 20000 / 65536
    assert np.abs(doubled.numpy() - expected)[200:-200].max() < 2e-3
    for samples in (100, 9000):
        wave = decode_audio(buffer.getvalue(), 8000, samples)
        assert wave.shape == (samples,) and torch.equal(wave[:100], files["WAV"][:100])
    assert not wave[8000:].any()
    with pytest.raises(DecodeError):
        decode_audio(b"noise", 8000)


def test_of_moving_pictures_the_first_frame_is_read():
    first, second = (Image.open(io.BytesIO(encode_picture(9, 14, "PNG", value=value))) for value in (10, 240))
    for kind, options in (("WEBP", {"lossless": True}), ("GIF", {})):
        buffer = io.BytesIO()
        first.save(buffer, kind, save_all=True, append_images=[second], **options)
        picture = decode_image_file(buffer.getvalue())
        assert tuple(picture.shape) == (3, 9, 14) and (picture == 10).all()


def encode_clip(kind, subtype, rate=8000):
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).normal(size=4000) * 0.1
    soundfile.write(buffer, noise, rate, format=kind, subtype=subtype)
    return buffer.getvalue()


@pytest.mark.parametrize(("kind", "subtype"), [("WAV", "PCM_16"), ("WAV", "FLOAT"), ("OGG", "VORBIS")])
def test_a_clip_without_its_end_is_no_shorter_clip(kind, subtype):
    raw = encode_clip(kind, subtype)
    assert parse_audio_header(raw) == (4000, 8000) and len(decode_audio(raw, 8000)) == 4000
    for cut in (2, len(raw) // 3):
        assert parse_audio_header(raw[:-cut]) is None
        with pytest.raises(DecodeError, match="the end of the file is missing"):
            decode_audio(raw[:-cut], 8000)


def test_a_clip_that_a_program_wrote_into_a_pipe_is_whole():
    raw = bytearray(encode_clip("WAV", "PCM_16"))
    at = raw.index(b"data") + 4
    raw[at : at + 4] = b"\xff\xff\xff\xff"
    assert parse_audio_header(bytes(raw)) == (4000, 8000)


@pytest.mark.parametrize(("kind", "subtype"), [("OGG", "OPUS"), ("AIFF", "PCM_16")])
def test_clips_of_other_formats_are_read(kind, subtype):
    raw = encode_clip(kind, subtype)
    assert parse_audio_header(raw) == (4000, 8000) and len(decode_audio(raw, 8000)) == 4000


def test_reader_counts_bytes_and_bounds_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr("data.storage.reader._OPEN_FILES", 2)
    paths = [tmp_path / f"{n}.bin" for n in range(6)]
    for n, path in enumerate(paths):
        path.write_bytes(bytes([n]) * 100)
    reader = ShardReader()
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None

    def work():
        for turn in range(200):
            n = turn % 6
            assert reader.read(paths[n], n, 10, "bin") == bytes([n]) * 10

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dict(reader.bytes_read) == {"bin": 4 * 200 * 10}
    reader.read(paths[0], 0, 1, "bin")
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) <= before + 2
    reader.close()
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before


def test_reader_errors(tmp_path):
    path = tmp_path / "s.tar"
    path.write_bytes(b"x" * 100)
    reader = ShardReader()
    with pytest.raises(ShardError, match=r"s\.tar: only 20 of 30 bytes at byte 80"):
        reader.read(path, 80, 30, "bin")
    with pytest.raises(ReadError, match="gone: cannot read 1 bytes at byte 0: No such file"):
        reader.read(tmp_path / "gone", 0, 1, "bin")
    with pytest.raises(ShardError, match=r"s\.tar.*changed"):
        ShardReader().read(path, 0, 1, "bin", ShardVersion(100, 1, 1, ""))
