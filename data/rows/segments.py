"""Segments of recordings: a record that names an audio file and gives `start` and `end` in seconds has only this part.

Keys are those of NeMo manifests (`offset`, `duration`), Lhotse (`start`, `duration`), Kaldi and Whisper (`start`,
`end`), in the record or in the part that names the file. The segment becomes a file of its own.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from data.errors import MissingLibrary, RecordError, reason_of
from data.media.audio_files import UNKNOWN_FLAC, AudioFile, mono_blocks
from data.media.options import Bounds
from data.rows.media_values import EMPTY, FileRange, MediaItem
from data.text_format import shown

SEGMENT = ("start", "end", "duration")
"""Parts of a record in `--columns`."""
NAMES = {"start": ("start", "offset", "video_start"), "end": ("end", "video_end"), "duration": ("duration",)}
"""Part -> its usual keys."""
SEGMENT_COLUMNS = tuple(key for keys in NAMES.values() for key in keys)
CUT = "with a segment of a recording: shards have only this part of it"
_MANIFEST = "audio_filepath"
"""Key of the file in a NeMo manifest, whose `duration` without `offset` starts at 0."""
_WHOLE_FILES = "If the file is not to be cut, build shards with --whole-files"
_OVERSHOOT = 0.5  # seconds that a segment may end after its recording, as for `extract-segments` of Kaldi
_LEFT_OUT = 0.01  # seconds of a recording that a segment may leave out to be the file as it is
_SEEKABLE = ("WAV", "WAVEX", "RF64", "W64", "AIFF", "AU", "CAF", "FLAC")
_INTEGERS = {"PCM_U8": 16, "PCM_S8": 16, "PCM_16": 16, "PCM_24": 24, "ULAW": 16, "ALAW": 16}
"""Subtype -> bits of a FLAC file with the same samples."""
_FLOATS = ("FLOAT", "DOUBLE", "PCM_32")
_ENDLESS = Bounds(seconds=math.inf)


class Segment(NamedTuple):
    start: float
    """Seconds."""
    end: float | None
    """Seconds; None: the end of the recording."""

    def __str__(self) -> str:
        return f"{self.start:.10g} to {'the end' if self.end is None else f'{self.end:.10g}'} s"


def cut_items(
    record: Mapping[str, Any], items: Sequence[MediaItem], names: Mapping[str, str], where: str
) -> Sequence[MediaItem]:
    """Return the media with segments in place of recordings that the record, or their part in it, has a segment of.

    A segment in the record applies to its one audio file or video, whose bytes are in the record only if `names`, see
    `Columns.names`, tells its columns: bytes next to `start` and `end` are usually the segment itself.

    Raises:
        RecordError: a segment is not in its recording, of a video, or of several files.
    """
    is_named = not names.keys().isdisjoint(SEGMENT)
    recordings = [at for at, item in enumerate(items) if item.kind != "image"]
    timed = [at for at in recordings if is_named or isinstance(items[at].content, FileRange)]
    cut = {at: segment for at in recordings if (segment := _segment_of(items[at].part, {}, where))}
    segment = _segment_of(record, names, where) if timed else None
    if segment and len(timed) > 1:
        raise RecordError(
            f"{where}: start and end ({segment}) apply to one recording, and the record has {len(timed)}. Give each as "
            'an object with "path", "start" and "end"'
        )
    if segment and cut.setdefault(timed[0], segment) != segment:
        raise RecordError(
            f"{where}: has the segments {segment} and {cut[timed[0]]} of one recording. Remove one of them"
        )
    return [_cut(item, cut[at], where) if at in cut else item for at, item in enumerate(items)]


def _segment_of(values: Mapping[str, Any], names: Mapping[str, str], where: str) -> Segment | None:
    """Return the segment that a record or a part of it selects. Raises RecordError."""
    start, end = (_seconds(values, names, part, where) for part in ("start", "end"))
    if start is None and end is None and _MANIFEST not in values and "duration" not in names:
        return None
    if end is None and (duration := _seconds(values, names, "duration", where)) is not None:
        end = (start or 0.0) + duration
    segment = Segment(start or 0.0, end)
    if end is not None and end <= segment.start:
        raise RecordError(f"{where}: a segment must end after its start, got {segment}")
    return segment


def _seconds(values: Mapping[str, Any], names: Mapping[str, str], part: str, where: str) -> float | None:
    keys = [names[part]] if part in names else [key for key in NAMES[part] if values.get(key) not in EMPTY]
    if len(keys) > 1:
        raise RecordError(f"{where}: has both {' and '.join(keys)}. Remove one of them")
    if keys and keys[0] not in values:
        raise RecordError(f"{where} has no {keys[0]!r}; it has {', '.join(sorted(map(str, values))[:8])}")
    if not keys or (value := values[keys[0]]) in EMPTY:
        return None
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        got = shown(repr(value)[:80])
        raise RecordError(f"{where}: {keys[0]!r} must be seconds of the recording, got {got}. {_WHOLE_FILES}")
    return seconds


def _cut(item: MediaItem, segment: Segment, where: str) -> MediaItem:
    where = f"{where}: {shown(item.name)}"
    if item.kind != "audio":
        raise RecordError(
            f"{where}: segments of a {item.kind} ({segment}) are not supported. Cut the file first, for example with "
            f"ffmpeg. {_WHOLE_FILES}"
        )
    try:
        cut = _cut_audio(item.content, segment)
    except MissingLibrary:
        raise
    except RecordError as error:
        raise RecordError(f"{where}: {error}") from error
    except Exception as error:  # LibsndfileError, DecodeError, RuntimeError and others: the file is damaged
        raise RecordError(f"{where}: cannot cut {segment} ({reason_of(error)})") from error
    return item if cut is None else item._replace(extension=cut[0], content=cut[1], known_extent=cut[2])


def _cut_audio(content: bytes | FileRange, segment: Segment) -> tuple[str, bytes, tuple[int, int]] | None:
    """Return (extension, bytes, extent) of a segment; None if it is the whole recording. Raises RecordError.

    Files of integers keep their samples and channels as FLAC, those of floats as WAV. Others, such as MP3, become mono
    FLAC files of 16 bits. They are decoded from their start: libsndfile does not seek them exactly.
    """
    import soundfile

    with soundfile.SoundFile(AudioFile(content) if isinstance(content, bytes) else content.path) as file:
        bits, is_float = _INTEGERS.get(file.subtype, 0), file.subtype in _FLOATS
        if file.format in _SEEKABLE and (bits or is_float) and file.frames < UNKNOWN_FLAC:
            frames, rate = file.frames, file.samplerate
            start, end = _frames_of(segment, frames, rate)
            file.seek(start)
            dtype = "float32" if is_float else "int16" if bits == 16 else "int32"
            wave = file.read(end - start, dtype=dtype, always_2d=True)
        else:
            recording, rate = _decoded(content)
            frames, bits = len(recording), 16
            start, end = _frames_of(segment, frames, rate)
            wave = recording[start:end]
    if len(wave) < end - start:
        raise RecordError(f"only {len(wave)} of the {end - start} samples of {segment} can be read")
    if frames - len(wave) <= _LEFT_OUT * rate:
        return None
    raw = io.BytesIO()
    kind, subtype = ("FLAC", f"PCM_{bits}") if bits else ("WAV", "FLOAT")
    soundfile.write(raw, wave, rate, format=kind, subtype=subtype)
    return kind.lower(), raw.getvalue(), (len(wave), rate)


def _frames_of(segment: Segment, frames: int, rate: int) -> tuple[int, int]:
    """Return first and last + 1 of the samples of a segment in a recording. Raises RecordError."""
    start, end = round(segment.start * rate), frames if segment.end is None else round(segment.end * rate)
    if start >= frames or end > frames + _OVERSHOOT * rate:
        length = f"{frames / rate:.10g} s"
        raise RecordError(f"the segment {segment} is outside of the recording, of {length}. {_WHOLE_FILES}")
    if start == end:
        raise RecordError(f"the segment {segment} has no sample at {rate} Hz")
    return start, min(end, frames)


@lru_cache(maxsize=1)  # segments of a recording are neighbours
def _decoded(content: bytes | FileRange) -> tuple[np.ndarray, int]:
    """Return (int16 [samples] of one channel, samples per second) of a recording."""
    raw = content if isinstance(content, bytes) else content.read()
    blocks, rates = [], set()
    for block, rate in mono_blocks(raw, _ENDLESS):
        blocks.append((block * 32768.0).round().clip(-32768, 32767).astype(np.int16))
        rates.add(rate)
    if len(rates) != 1:
        raise RecordError(f"expected one sampling rate, got {sorted(rates) or 'no audio'}")
    return np.concatenate(blocks), rates.pop()
