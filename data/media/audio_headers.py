"""Headers of clips: length and rate of an audio file, and whether its end is missing. A file whose header does not give
its length is decoded, so that the index and the decoder agree."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import pairwise
from typing import Literal

from data.errors import MissingLibrary
from data.media.decoded_audio import container_to_decode, decoded_blocks

_MOST_PARTS = 1 << 16  # chunks and pages that are walked through: files of nothing else have millions
_UNKNOWN_LENGTH = 0x7FFFF000  # of samples in 32 bits: programs that write into a pipe put this or more
_UNKNOWN_OF_CAF = (1 << 64) - 1
_NOT_READ_RIGHT = {"SDS": (), "XI": (), "AIFF": ("DWVW_12", "DWVW_16", "DWVW_24")}
"""Formats and their subtypes, all if none is named, of which libsndfile 1.2 gives other numbers than were written
(SDS), a rate that it makes up (XI), or nothing from memory (DWVW)."""


def parse_audio_header(raw: bytes) -> tuple[int, int] | None:
    """(samples per channel, samples per second) of a whole audio file, or None, also for one that is cut off. Never
    raises for bad bytes; MissingLibrary: it must be decoded, and PyAV is not installed."""
    import soundfile

    if is_cut_off(raw):
        return None
    lengths, rates = [0], set()
    try:
        for part in chained_parts(raw):
            with soundfile.SoundFile(AudioFile(part)) as file:
                blocks = [(int(file.frames), int(file.samplerate))]
                if container := container_to_decode(file.format, file.frames, raw):
                    blocks = [(len(block), rate) for block, rate in decoded_blocks(raw, container)]
            lengths += [length for length, _ in blocks]
            rates |= {rate for _, rate in blocks}
    except MissingLibrary:
        raise
    except Exception:  # SoundFileError and RuntimeError; what else there may be means the same
        return None
    return (sum(lengths), rates.pop()) if sum(lengths) and len(rates) == 1 and min(rates) > 0 else None


def not_read_right(form: str, subtype: str) -> str | None:
    """What is wrong with a file of this format and subtype, as libsndfile calls them; None: it is read."""
    subtypes = _NOT_READ_RIGHT.get(form)
    if subtypes is None or (subtypes and subtype not in subtypes):
        return None
    return f"{form} with {subtype} is not read right by libsndfile: convert it, for example to FLAC"


class AudioFile(io.BytesIO):
    """Bytes for soundfile 0.14, which prints a traceback where a damaged header makes it seek to before the start:
    such a seek does nothing, and the library finds the damage."""

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        try:
            return super().seek(offset, whence)
        except (ValueError, OverflowError):
            return self.tell()


def is_cut_off(raw: bytes) -> bool:
    """Whether the end of a WAV, AIFF, AU, CAF, W64 or OGG file is missing, which their decoders take for a shorter
    clip. (Of a FLAC or MP3 file it is missed when it is decoded.)"""
    if raw[:4] == b"OggS":
        return _ends_behind(raw)
    for name, start, length in _chunks(raw):
        if name in (b"data", b"SSND"):
            return start + length > len(raw)
    return False


def _chunks(raw: bytes) -> Iterator[tuple[bytes, int, int]]:
    """(name, where its content begins, bytes of it) of the chunks of a file, up to one of unknown length."""
    magic, form = raw[:4], raw[8:12]
    order: Literal["little", "big"] = "little"
    if magic in (b"RIFF", b"RIFX", b"RF64") and form == b"WAVE":
        order = "big" if magic == b"RIFX" else "little"
        offset, of_name, of_length, head, align = 12, 4, 4, 8, 2
    elif magic == b"FORM" and form in (b"AIFF", b"AIFC"):
        order, offset, of_name, of_length, head, align = "big", 12, 4, 4, 8, 2
    elif magic == b"caff":
        order, offset, of_name, of_length, head, align = "big", 8, 4, 8, 12, 1
    elif magic == b"riff" and raw[24:28] == b"wave":  # W64: names are GUIDs, lengths count them too
        offset, of_name, of_length, head, align = 40, 16, 8, 24, 8
    elif magic in (b".snd", b"dns."):
        order = "big" if magic == b".snd" else "little"
        start, length = (int.from_bytes(raw[at : at + 4], order) for at in (4, 8))
        if length < _UNKNOWN_LENGTH:
            yield b"data", start, length
        return
    else:
        return
    long = 0  # of the samples, where 32 bits do not hold it
    for _ in range(_MOST_PARTS):
        if len(raw) < offset + head:
            return
        name = raw[offset : offset + of_name][:4]
        length = int.from_bytes(raw[offset + of_name : offset + of_name + of_length], order)
        if magic == b"riff":
            length = max(length - head, 0)
        if name == b"ds64":
            long = int.from_bytes(raw[offset + head + 8 : offset + head + 16], order)
        if of_length == 4 and name == b"data" and length >= _UNKNOWN_LENGTH:
            if not long:
                return
            length = long
        if length == _UNKNOWN_OF_CAF:
            return
        yield name, offset + head, length
        offset += head + -(-length // align) * align


def chained_parts(raw: bytes) -> list[bytes]:
    """The files that a chained OGG file consists of, of which libsndfile reads the first; any other file as it is."""
    starts, pages = [0], [*_pages(raw)]
    for (_, _, before), (start, _, first) in pairwise(pages):
        if first and not before:  # streams side by side begin together
            starts.append(start)
    return [raw[start:end] for start, end in pairwise([*starts, len(raw)])] if len(starts) > 1 else [raw]


def _ends_behind(raw: bytes) -> bool:
    """Whether the last page of an OGG file goes on behind its end."""
    return any(end > len(raw) for _, end, _ in _pages(raw))


def _pages(raw: bytes) -> Iterator[tuple[int, int, bool]]:
    """(start, end, whether a stream begins with it) of the pages of an OGG file; the end may be behind the file's."""
    start = 0
    while raw[start : start + 4] == b"OggS":
        segments = raw[start + 26] if len(raw) > start + 26 else 0
        end = start + 27 + segments + sum(raw[start + 27 : start + 27 + segments])
        yield start, end, bool(raw[start + 5 : start + 6] and raw[start + 5] & 2)
        start = end
