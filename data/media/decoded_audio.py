"""Audio files whose header does not give their length: PyAV (the extra `video`) decodes them to the end.

The length of an MP3 file is in a Xing or Info header, which only some encoders write. Without it libsndfile estimates
the length from the first frame, which is wrong for a variable bit rate. Of files joined into one it reads the first.
The length of a FLAC file is 0 if its encoder wrote into a pipe.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np

from data.errors import DecodeError, MissingLibrary

_TAGS = (b"ID3", b"TAG", b"APETAGEX", b"LYRICSBEGIN")
"""Beginnings of tags, which may follow or separate the frames of a file."""
_SIDE_INFO = 64  # bytes of the first frame in which its header begins


_UNKNOWN = 1 << 62  # libsndfile gives more as the length of a FLAC file that has none


def container_to_decode(form: str, frames: int, raw: bytes) -> str:
    """Return the container format to decode a file as if its header does not give its length; empty if it does.

    Args:
        form: its format, as libsndfile calls it.
        frames: its length, as libsndfile reads it.
    """
    if form == "MP3":
        return "" if _is_measured(raw) else "mp3"
    return "flac" if form == "FLAC" and frames >= _UNKNOWN else ""


def _is_measured(raw: bytes) -> bool:
    """True if the Xing or Info header of an MP3 file gives the length of all that is in the file."""
    start = 0
    if raw[:3] == b"ID3":
        start = 10 + sum((byte & 0x7F) << shift for byte, shift in zip(raw[6:10], (21, 14, 7, 0), strict=False))
        start += 10 if raw[5:6] > b"\x0f" else 0  # its footer
    at = max(raw.find(name, start, start + _SIDE_INFO) for name in (b"Xing", b"Info"))
    flags, frames, size = (int.from_bytes(raw[at + step : at + step + 4], "big") for step in (4, 8, 12))
    if at < 0 or flags & 3 != 3 or not frames:
        return False
    rest = raw[start + size :]
    return not rest.strip(b"\0") or rest.startswith(_TAGS[1:])


def decoded_blocks(raw: bytes, container: str) -> Iterator[tuple[np.ndarray, int]]:
    """(float32 [samples], samples per second) of every frame of a file, the mean of its channels.

    Raises:
        DecodeError: a frame is damaged.
        MissingLibrary: PyAV is not installed.
    """
    try:
        import av
    except ImportError as error:
        raise MissingLibrary(
            f"PyAV, which decodes {container} files without a length in their header, is not installed: pip install "
            "'mimo-train[video]'"
        ) from error
    damage: DecodeError | None = None
    with av.open(io.BytesIO(raw), format=container, io_open=_no_other_file) as file:
        for packet in file.demux(audio=0):
            try:
                frames = packet.decode()
            except av.InvalidDataError as error:
                if not bytes(packet).startswith(_TAGS):
                    damage = damage or DecodeError(f"a frame of {container} is damaged ({error.strerror})")
                continue
            for frame in frames:
                if damage:  # behind the last frame of an MP3 file it is no audio
                    raise damage
                samples = frame.to_ndarray()
                if not frame.format.is_planar:
                    samples = samples.reshape(-1, frame.layout.nb_channels).T
                if samples.dtype.kind == "i":  # all bits of its width are used
                    samples = samples * np.float32(0.5 ** (8 * samples.itemsize - 1))
                yield samples.mean(axis=0, dtype=np.float32), frame.sample_rate
    if damage and container != "mp3":
        raise damage


def _no_other_file(url: str, flags: int, options: Any) -> Any:
    raise DecodeError("it refers to another file")
