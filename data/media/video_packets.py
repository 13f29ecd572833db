"""Times of the frames of a video, from its packets: the file is read, and nothing is decoded."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple

from data.errors import DecodeError

_HIDDEN = 0x10  # set in the first byte of a VP8 packet with a visible frame (RFC 6386, section 9.1)


class Packets(NamedTuple):
    """Times in the packets of a stream, in its `time_base`."""

    times: list[int]
    """Presentation times of its frames, ascending, without those that are never presented."""
    keys: list[int]
    """Presentation times of key frames, ascending."""
    seconds: Fraction
    """Time from the first frame to the end of the last; 0 for one frame without a duration."""
    sound: Fraction
    """Seconds of the first sound track; 0 without one."""


def video_stream(file: Any) -> Any:
    """Return the first video stream of a PyAV container that is not a cover image. Raises DecodeError."""
    for stream in file.streams.video:
        if stream.codec_context is None:
            raise DecodeError("FFmpeg has no decoder of its video track")
        if not stream.disposition & type(stream.disposition).attached_pic:
            return stream
    raise DecodeError("no video track in it")


def scan_packets(file: Any, stream: Any) -> Packets:
    """Read the packets of a video stream of a PyAV container. Raises DecodeError without a frame."""
    times, keys, last = list[int](), list[int](), (0, 0)
    tracks, heard = file.streams.audio[:1], list[int]()  # start and end of the sound
    has_hidden_frames = stream.codec_context.name == "vp8"
    for packet in file.demux([stream, *tracks]):
        if not packet.size or packet.is_discard:
            continue
        if packet.pts is None:
            raise DecodeError("a frame or a block of sound in it has no time")
        if packet.stream_index != stream.index:
            heard = heard or [max(packet.pts, 0), 0]  # decoders drop what is before 0
            heard[1] = packet.pts + (packet.duration or 0)
            continue
        if has_hidden_frames and packet.size and not memoryview(packet)[0] & _HIDDEN:
            continue
        last = max(last, (packet.pts, packet.duration or 0)) if times else (packet.pts, packet.duration or 0)
        times.append(packet.pts)
        if packet.is_keyframe:
            keys.append(packet.pts)
    if not times:
        raise DecodeError("no frame in it")
    times.sort()
    between = Fraction(times[-1] - times[0], max(len(times) - 1, 1))
    seconds = (last[0] - times[0] + (last[1] or between)) * Fraction(stream.time_base)
    sound = (heard[1] - heard[0]) * Fraction(tracks[0].time_base) if heard else Fraction(0)
    return Packets(times, sorted(keys), seconds, sound)


def milliseconds_of(frames: Any, numerator: Any, denominator: Any) -> Any:
    """Return the length of videos, integers or int64 arrays: at least 1, and 0 without frames. The rate is `numerator`
    / `denominator` frames per second; all are below 2^31."""
    numerator = numerator + (numerator == 0)
    seconds, rest = divmod(frames * denominator, numerator)
    milliseconds = 1000 * seconds + 1000 * rest // numerator
    return milliseconds + ((milliseconds == 0) & (frames > 0))
