"""Audio files of every format are read as they were written, to their end, and the index has the same length."""

import io
import sys

import numpy as np
import pytest
import soundfile
import torch

from data.errors import DecodeError, MissingLibrary
from data.index.indexing import build_index
from data.media.audio import decode_audio
from data.media.audio_files import parse_audio_header
from tests.tars import write_tar

av = pytest.importorskip("av")


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
RATE = 16000
PAUSE = np.zeros(5 * RATE, dtype=np.float32)


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
    for cut in (6, 40, len(raw) // 2):
        with pytest.raises(DecodeError):
            decode_audio(raw[:-cut], 8000)
        assert kind == "FLAC" or parse_audio_header(raw[:-cut]) is None


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


def test_a_clip_that_a_program_wrote_into_a_pipe_is_whole():
    raw = bytearray(sound(TONE, "WAV", "PCM_16"))
    at = raw.index(b"data") + 4
    raw[at : at + 4] = b"\xff\xff\xff\xff"
    assert parse_audio_header(bytes(raw)) == (8000, 8000)


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


def sound_at_16_khz(wave, kind, subtype=None, rate=RATE):
    return sound(wave, kind, subtype, rate)


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
    one = sound_at_16_khz(tone(3), "MP3")
    wave = read(one + sound_at_16_khz(tone(2, 1000), "MP3"), "mp3", tmp_path)
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
    parts = [sound_at_16_khz(wave, "OGG", subtype) for wave in (tone(2), tone(1, 1000), tone(2))]
    expected = np.concatenate([decode_audio(part, RATE).numpy() for part in parts])
    wave = read(b"".join(parts), "ogg", tmp_path)
    assert len(wave) == 5 * RATE and np.array_equal(wave, expected)
    assert parse_audio_header(b"".join(parts)[:-40]) is None
    other = parts[0] + sound_at_16_khz(tone(1), "OGG", subtype, rate=8000)
    assert parse_audio_header(other) is None
    with pytest.raises(DecodeError, match="its parts have different rates .16000 and 8000 Hz"):
        decode_audio(other, RATE)


@pytest.mark.parametrize("subtype", ["PCM_S8", "PCM_16", "PCM_24"])
def test_a_flac_file_without_a_length_is_read_to_the_end(subtype, tmp_path):
    raw = bytearray(sound_at_16_khz(np.stack([tone(2), tone(2, 1000)], axis=1), "FLAC", subtype))
    expected = decode_audio(bytes(raw), RATE).numpy()
    raw[21] &= 0xF0
    raw[22:26] = bytes(4)  # as written into a pipe
    assert np.array_equal(read(bytes(raw), "flac", tmp_path), expected)
    with pytest.raises(DecodeError):
        decode_audio(bytes(raw[:-300]), RATE)


def test_the_missing_decoder_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "av", None)
    raw = mp3_without_header = sound_at_16_khz(tone(1), "MP3").replace(b"Xing", b"????", 1)
    assert mp3_without_header != sound_at_16_khz(tone(1), "MP3")
    for reading in (parse_audio_header, lambda raw: decode_audio(raw, RATE), lambda raw: read(raw, "mp3", tmp_path)):
        with pytest.raises(MissingLibrary, match=r"PyAV, which decodes mp3 .*mimo-train\[video\]") as error:
            reading(raw)
    assert str(tmp_path / "x.tar") in str(error.value)


def test_libsndfile_reads_them_wrong_still():
    """Else PyAV and the parts of a chained OGG are no longer needed."""
    half, unknown = sound_at_16_khz(tone(2), "OGG"), bytearray(sound_at_16_khz(tone(2), "FLAC"))
    unknown[21:26] = bytes([unknown[21] & 0xF0, 0, 0, 0, 0])
    raws = [mp3(np.concatenate([tone(3), PAUSE]), header=False, variable=True), half + half, bytes(unknown)]
    lengths = [soundfile.SoundFile(io.BytesIO(raw)).frames for raw in raws]
    assert lengths[0] < 4 * RATE and lengths[1] == 2 * RATE and lengths[2] > 1 << 60
