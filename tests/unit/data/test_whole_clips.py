"""Clips whose header does not give their length are read to the end, and the index has the same length."""

import io
import sys

import numpy as np
import pytest
import soundfile

from data.errors import DecodeError, MissingLibrary
from data.index.indexing import build_index
from data.media.audio_files import parse_audio_header
from data.media.decode import decode_audio
from tests.tars import write_tar

av = pytest.importorskip("av")
RATE = 16000
PAUSE = np.zeros(5 * RATE, dtype=np.float32)


def tone(seconds, hertz=440):
    return (0.3 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * RATE)) / RATE)).astype(np.float32)


def mp3(wave, *, header, variable):
    out = io.BytesIO()
    with av.open(out, "w", format="mp3", options={"write_xing": str(int(header))}) as file:
        stream = file.add_stream("libmp3lame", rate=RATE, layout="mono")
        if variable:
            stream.codec_context.qscale, stream.codec_context.global_quality = True, 2 * 118
        else:
            stream.bit_rate = 64000
        for start in range(0, len(wave), 1152):
            block = np.ascontiguousarray(wave[None, start : start + 1152])
            frame = av.AudioFrame.from_ndarray(block, format="fltp", layout="mono")
            frame.sample_rate = RATE
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return out.getvalue()


def sound(wave, kind, subtype=None, rate=RATE):
    out = io.BytesIO()
    soundfile.write(out, wave, rate, format=kind, subtype=subtype)
    return out.getvalue()


def read(raw, extension, tmp_path):
    """The wave of a clip, of the length that its index has."""
    index = build_index(write_tar(tmp_path / "x.tar", [(f"0.{extension}", raw), ("0.txt", b"A.")]))
    wave = decode_audio(raw, RATE).numpy()
    assert index.members(0)[0].extent == (len(wave), RATE)
    return wave


@pytest.mark.parametrize("variable", [False, True])
@pytest.mark.parametrize("header", [False, True])
def test_mp3_files_are_read_to_the_end(header, variable, tmp_path):
    whole = np.concatenate([tone(3), PAUSE, tone(2, 1000)])
    wave = read(mp3(whole, header=header, variable=variable), "mp3", tmp_path)
    # Without a header nothing says how much silence the encoder put around the sound.
    assert len(wave) == len(whole) if header else 0 <= len(wave) - len(whole) < 2400
    assert np.argmax(np.abs(np.fft.rfft(wave[9 * RATE : 10 * RATE]))) == 1000
    assert np.abs(wave[4 * RATE : 7 * RATE]).max() < 1e-3


def test_joined_mp3_files_are_read_to_the_end(tmp_path):
    one = sound(tone(3), "MP3")
    wave = read(one + sound(tone(2, 1000), "MP3"), "mp3", tmp_path)
    assert len(read(one, "mp3", tmp_path)) == 3 * RATE and 0 <= len(wave) - 5 * RATE < 4800
    assert np.argmax(np.abs(np.fft.rfft(wave[4 * RATE : 5 * RATE]))) == 1000


@pytest.mark.parametrize("junk", [b"TAG" + bytes(125), bytes(500), b"hello world" * 20])
def test_what_follows_the_last_frame_of_an_mp3_file_is_no_fault(junk, tmp_path):
    raw = mp3(tone(2), header=False, variable=False)
    assert np.array_equal(read(raw + junk, "mp3", tmp_path), read(raw, "mp3", tmp_path))


def test_a_damaged_mp3_frame_makes_a_bad_sample():
    raw = bytearray(mp3(tone(2), header=False, variable=False))
    raw[len(raw) // 2 : len(raw) // 2 + 300] = bytes(300)
    with pytest.raises(DecodeError, match="a frame of mp3 is damaged"):
        decode_audio(bytes(raw), RATE)
    assert parse_audio_header(bytes(raw)) is None


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_a_chained_ogg_is_read_to_the_end(subtype, tmp_path):
    parts = [sound(wave, "OGG", subtype) for wave in (tone(2), tone(1, 1000), tone(2))]
    expected = np.concatenate([decode_audio(part, RATE).numpy() for part in parts])
    wave = read(b"".join(parts), "ogg", tmp_path)
    assert len(wave) == 5 * RATE and np.array_equal(wave, expected)
    assert parse_audio_header(b"".join(parts)[:-40]) is None
    other = parts[0] + sound(tone(1), "OGG", subtype, rate=8000)
    assert parse_audio_header(other) is None
    with pytest.raises(DecodeError, match="its parts have different rates .16000 and 8000 Hz"):
        decode_audio(other, RATE)


@pytest.mark.parametrize("subtype", ["PCM_S8", "PCM_16", "PCM_24"])
def test_a_flac_file_without_a_length_is_read_to_the_end(subtype, tmp_path):
    raw = bytearray(sound(np.stack([tone(2), tone(2, 1000)], axis=1), "FLAC", subtype))
    expected = decode_audio(bytes(raw), RATE).numpy()
    raw[21] &= 0xF0
    raw[22:26] = bytes(4)  # as written into a pipe
    assert np.array_equal(read(bytes(raw), "flac", tmp_path), expected)
    with pytest.raises(DecodeError):
        decode_audio(bytes(raw[:-300]), RATE)


def test_the_missing_decoder_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "av", None)
    raw = mp3_without_header = sound(tone(1), "MP3").replace(b"Xing", b"????", 1)
    assert mp3_without_header != sound(tone(1), "MP3")
    for reading in (parse_audio_header, lambda raw: decode_audio(raw, RATE), lambda raw: read(raw, "mp3", tmp_path)):
        with pytest.raises(MissingLibrary, match=r"PyAV, which decodes mp3 .*mimo-train\[video\]") as error:
            reading(raw)
    assert str(tmp_path / "x.tar") in str(error.value)


def test_libsndfile_reads_them_wrong_still():
    """Else PyAV and the parts of a chained OGG are no longer needed."""
    half, unknown = sound(tone(2), "OGG"), bytearray(sound(tone(2), "FLAC"))
    unknown[21:26] = bytes([unknown[21] & 0xF0, 0, 0, 0, 0])
    raws = [mp3(np.concatenate([tone(3), PAUSE]), header=False, variable=True), half + half, bytes(unknown)]
    lengths = [soundfile.SoundFile(io.BytesIO(raw)).frames for raw in raws]
    assert lengths[0] < 4 * RATE and lengths[1] == 2 * RATE and lengths[2] > 1 << 60
