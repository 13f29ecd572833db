"""Audio files: length and rate from their headers, and their samples, by soundfile.

PyAV (the extra `video`) decodes files without a length in their header: MP3 without a Xing or Info header, where
libsndfile estimates wrongly for variable bit rates and joined files, and FLAC from a pipe.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from data.errors import DecodeError, MissingLibrary
from data.media.options import BOUNDS, Bounds

_BLOCK = 1 << 20  # samples of each channel that are decoded at once
UNKNOWN_FLAC = 1 << 62  # libsndfile reports more for a FLAC file without a length
_UNKNOWN_SIZE = 0x7FFFF000  # programs that write into a pipe state at least this size
_SHORTER = re.compile(r"^\s*(?:data|SSND|Data Size|riff)\s*: (\d+) \(should be (\d+)\)", re.MULTILINE)
_CAF_SAMPLES = re.compile(r"^data : (\d+)", re.MULTILINE)
_UNKNOWN_CAF = 1 << 63
_SHORTER_RF64 = "does not match value from 'ds64' chunk"
"""Patterns in libsndfile 1.2's log for files with fewer samples than their header says; it reads them as shorter."""
_UNSUPPORTED = {"SDS": (), "XI": (), "AIFF": ("DWVW_12", "DWVW_16", "DWVW_24")}
"""Formats and subtypes (none: all) that libsndfile 1.2 reads incorrectly. It gives wrong numbers (SDS), an invented
rate (XI), or nothing from memory (DWVW)."""
_MP3_TAGS = (b"ID3", b"TAG", b"APETAGEX", b"LYRICSBEGIN")
"""Starts of tags, which may follow or separate the frames of an MP3 file."""
_MP3_SIDE_INFO = 64  # bytes of the first frame in which its Xing or Info header starts


class AudioFile(io.BytesIO):
    """Bytes for soundfile 0.14, which prints a traceback if a damaged header makes it seek to before the start. Here
    such a seek does nothing, and libsndfile reports the damage."""

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        try:
            return super().seek(offset, whence)
        except (ValueError, OverflowError):
            return self.tell()


def parse_audio_header(raw: bytes) -> tuple[int, int] | None:
    """Return (samples per channel, samples per second) of an audio file; None if it is damaged or truncated.

    Raises MissingLibrary if its header does not give its length, and PyAV is not installed.
    """
    import soundfile

    lengths, rates = [0], set()
    try:
        for part in _chained_parts(raw):
            with soundfile.SoundFile(AudioFile(part)) as file:
                if _is_cut_off(file, raw):
                    return None
                blocks = [(int(file.frames), int(file.samplerate))]
                if container := _container_to_decode(file, raw):
                    blocks = [(len(block), rate) for block, rate in decoded_blocks(raw, container)]
            lengths += [length for length, _ in blocks]
            rates |= {rate for _, rate in blocks}
    except MissingLibrary:
        raise
    except Exception:  # SoundFileError, RuntimeError and others: the bytes are damaged
        return None
    return (sum(lengths), rates.pop()) if sum(lengths) and len(rates) == 1 and min(rates) > 0 else None


def mono_blocks(raw: bytes, bounds: Bounds = BOUNDS) -> Iterator[tuple[np.ndarray, int]]:
    """Yield (float32 [samples], samples per second) of an audio file block by block: the mean of its channels.

    Raises:
        DecodeError: it is truncated, damaged, unsupported, or above its bounds. soundfile raises errors of its own too.
        MissingLibrary: its header does not give its length, and PyAV is not installed.
    """
    import soundfile

    for part in _chained_parts(raw):
        with soundfile.SoundFile(AudioFile(part)) as file:
            if _is_cut_off(file, raw):
                raise DecodeError(f"{len(raw)} bytes of audio: the end of the file is missing")
            if container := _container_to_decode(file, raw):
                yield from decoded_blocks(raw, container)
                return
            if excess := bounds.excess("seconds", file.frames / file.samplerate):
                raise DecodeError(excess)
            subtypes = _UNSUPPORTED.get(file.format)
            if subtypes is not None and (not subtypes or file.subtype in subtypes):
                raise DecodeError(
                    f"{file.format} with {file.subtype} is not read right by libsndfile: convert it, such as to FLAC"
                )
            frames = 0
            # Not integers: libsndfile would read floats in [-1, 1] as zeros and ones.
            while len(block := file.read(min(_BLOCK, file.frames), dtype="float32", always_2d=True)):
                frames += len(block)
                yield block.mean(axis=1), file.samplerate
            if frames < file.frames:
                raise DecodeError(f"only {frames} of {file.frames} samples of {len(raw)} bytes of audio can be read")


def _is_cut_off(file: Any, raw: bytes) -> bool:
    """True if the end of a WAV, AIFF, AU, CAF, W64 or OGG file is missing. FLAC and MP3 fail when decoded."""
    if file.format == "OGG":
        return any(end > len(raw) for _, end, _ in _ogg_pages(raw))
    log = file.extra_info
    if match := _CAF_SAMPLES.search(log) if file.format == "CAF" else None:  # the log may not report it
        size = int(match[1])
        at = raw.find(b"data" + size.to_bytes(8, "big"))
        return at >= 0 and size < _UNKNOWN_CAF and at + 12 + size > len(raw)
    sizes = [(int(stated), int(actual)) for stated, actual in _SHORTER.findall(log)]
    return any(actual < stated < _UNKNOWN_SIZE for stated, actual in sizes) or _SHORTER_RF64 in log


def _chained_parts(raw: bytes) -> list[bytes]:
    """Split a chained OGG file, of which libsndfile reads only the first part. Other files are returned unchanged."""
    starts, pages = [0], [*_ogg_pages(raw)]
    for (_, _, was_first), (start, _, is_first) in pairwise(pages):
        if is_first and not was_first:  # parallel streams start together
            starts.append(start)
    return [raw[start:end] for start, end in pairwise([*starts, len(raw)])] if len(starts) > 1 else [raw]


def _ogg_pages(raw: bytes) -> Iterator[tuple[int, int, bool]]:
    """Yield (start, end, True if a stream starts there) of each page. The last page may end after the file."""
    start = 0
    while raw[start : start + 4] == b"OggS":
        segments = raw[start + 26] if len(raw) > start + 26 else 0
        end = start + 27 + segments + sum(raw[start + 27 : start + 27 + segments])
        yield start, end, bool(raw[start + 5 : start + 6] and raw[start + 5] & 2)
        start = end


def _container_to_decode(file: Any, raw: bytes) -> str:
    """Return the container of a file whose header does not give its length, else ""."""
    if file.format == "MP3":
        return "" if _is_mp3_length_known(raw) else "mp3"
    return "flac" if file.format == "FLAC" and file.frames >= UNKNOWN_FLAC else ""


def _is_mp3_length_known(raw: bytes) -> bool:
    """True if the Xing or Info header of an MP3 file gives the length of the whole file."""
    start = 0
    if raw[:3] == b"ID3":
        start = 10 + sum((byte & 0x7F) << shift for byte, shift in zip(raw[6:10], (21, 14, 7, 0), strict=False))
        start += 10 if raw[5:6] > b"\x0f" else 0  # its footer
    at = max(raw.find(name, start, start + _MP3_SIDE_INFO) for name in (b"Xing", b"Info"))
    flags, frames, size = (int.from_bytes(raw[at + step : at + step + 4], "big") for step in (4, 8, 12))
    if at < 0 or flags & 3 != 3 or not frames:
        return False
    rest = raw[start + size :]
    return not rest.strip(b"\0") or rest.startswith(_MP3_TAGS[1:])


def decoded_blocks(raw: bytes, container: str) -> Iterator[tuple[np.ndarray, int]]:
    """Yield `mono_blocks` of the first audio track of a file, by PyAV. Raises DecodeError, MissingLibrary.

    Args:
        container: libavformat's name.
    """
    av = import_av(f"{container} files without a length in their header")
    damage: DecodeError | None = None
    with av.open(io.BytesIO(raw), format=container, io_open=open_no_other_file) as file:
        if not file.streams.audio:
            raise DecodeError("no sound track in it")
        for packet in file.demux(audio=0):
            try:
                frames = packet.decode()
            except av.InvalidDataError as error:
                if not bytes(packet).startswith(_MP3_TAGS):
                    damage = damage or DecodeError(f"a frame of {container} is damaged ({error.strerror})")
                continue
            for frame in frames:
                if damage:  # after the last frame of an MP3 file it is no audio
                    raise damage
                samples = frame.to_ndarray()
                if not frame.format.is_planar:
                    samples = samples.reshape(-1, frame.layout.nb_channels).T
                if samples.dtype == np.uint8:
                    samples = (samples.astype(np.int16) - 128) * 256
                if samples.dtype.kind == "i":  # full range of its width
                    samples = samples * np.float32(0.5 ** (8 * samples.itemsize - 1))
                yield samples.mean(axis=0, dtype=np.float32), frame.sample_rate
    if damage and container != "mp3":
        raise damage


def import_av(what: str) -> Any:
    """Return PyAV, which decodes `what`. Raises MissingLibrary."""
    try:
        import av
    except ImportError as error:
        raise MissingLibrary(
            f"PyAV, which decodes {what}, is not installed: pip install 'mimo-train[video]'"
        ) from error
    return av


def open_no_other_file(url: str, flags: int, options: Any) -> Any:
    """Raise DecodeError, as PyAV's `io_open`: media files must not refer to other files."""
    raise DecodeError("it refers to another file")
