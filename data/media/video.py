"""Decode frames of videos (MP4, MOV, WebM and Matroska) with PyAV (the extra `video`).

The container is given to libavformat: by itself it may take a file for a list of other files, or URLs, to open.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch

from data.errors import DecodeError, reason_of
from data.media.audio_files import import_av, open_no_other_file
from data.media.headers import VideoHeader, parse_video_header_bytes
from data.media.options import BOUNDS, Bounds

_CODED_MORE = 1 << 20  # pixels that are coded around those of a frame


class _Packets(NamedTuple):
    """Times in the packets of a stream, in its units unless stated."""

    shown: list[int]
    """Presentation times of frames, ascending."""
    keys: list[tuple[int, int]]
    """(presentation time, decoding time) of every key frame, ascending."""
    end: Fraction
    """Seconds from the first frame to the end of the last."""
    longest: Fraction
    """Longest duration of a frame in seconds."""


def decode_video(raw: bytes, count: int, bounds: Bounds = BOUNDS) -> Iterator[torch.Tensor]:
    """Yield the frames at the middle of `count` equal parts of a video, uint8 [3, H, W], RGB, upright, in order.

    A long frame may repeat.

    Raises:
        DecodeError: it is damaged, above its bounds, or of another length or size than its header says.
        MemoryShortage, MissingLibrary: this machine cannot decode it.
    """
    header = parse_video_header_bytes(raw)
    if header is None:
        raise DecodeError(f"no header of a video that can be decoded in {len(raw)} bytes")
    excess = bounds.excess_of_extent("image", header.height, header.width)
    if excess := excess or bounds.excess("seconds", header.milliseconds / 1000):
        raise DecodeError(excess)
    av = import_av("videos")
    decoder = None
    try:
        with _opened(av, raw, header) as file:
            packets = _packets(file, header)
            unit = file.streams.video[0].time_base
        _require_length(packets, header)
        decoder = _Decoder(av, raw, header, packets.keys)
        for at in range(count):
            middle = Fraction((2 * at + 1) * header.milliseconds, 2000 * count)
            # the last frame that has started by then
            place = bisect_right(packets.shown, packets.shown[0] + middle / unit) - 1
            yield _upright(decoder.frame_at(packets.shown[place]), header)
    except DecodeError:
        raise
    except Exception as error:  # av.FFmpegError and others: the bytes are damaged
        raise DecodeError(f"cannot decode {len(raw)} bytes of video: {reason_of(error)}") from error
    finally:
        if decoder is not None:
            decoder.close()


def _opened(av: Any, raw: bytes, header: VideoHeader) -> Any:
    # Limited, because libavformat decodes the first frames at any size.
    largest = {"max_pixels": str(header.height * header.width + _CODED_MORE)}
    file = av.open(io.BytesIO(raw), format=header.container, options=largest, io_open=open_no_other_file)
    context = file.streams.video[0].codec_context
    context.thread_count = 1  # samples are decoded in parallel already
    context.options = {"err_detect": "explode"} | largest  # raise an error instead of concealing damage
    return file


def _packets(file: Any, header: VideoHeader) -> _Packets:
    stream = file.streams.video[0]
    # A Matroska file is as long as its longest track.
    streams = [stream] if header.container == "mov" else [*file.streams.video, *file.streams.audio]
    shown, keys, ends, longest = [], [], [Fraction(0)], Fraction(0)
    for packet in file.demux(streams):
        if packet.pts is None or packet.is_discard:
            continue
        ends.append((packet.pts + (packet.duration or 0)) * packet.time_base)
        if packet.stream_index != stream.index:
            continue
        longest = max(longest, (packet.duration or 0) * packet.time_base)
        shown.append(packet.pts)
        if packet.is_keyframe:
            # MP4 files seek by decoding time.
            keys.append((packet.pts, packet.dts if header.container == "mov" else packet.pts))
    if not shown or not keys:
        raise DecodeError("no frame in it")
    shown.sort()
    steps = (after - before for before, after in zip(shown[:-1], shown[1:], strict=True))
    longest = max(longest, max(steps, default=0) * stream.time_base)
    return _Packets(shown, sorted(keys), max(ends) - shown[0] * stream.time_base, longest)


def _require_length(packets: _Packets, header: VideoHeader) -> None:
    """Raise DecodeError unless the length matches the header, from which the number of frames was planned."""
    stated = Fraction(header.milliseconds, 1000)
    if abs(packets.end - stated) > stated / 50 + 2 * packets.longest:
        raise DecodeError(
            f"its header says that it lasts {float(stated):.2f} s, and its frames end after {float(packets.end):.2f} s"
        )


class _Decoder:
    """Decodes a video forwards, and seeks to the next key frame if it can skip frames."""

    def __init__(self, av: Any, raw: bytes, header: VideoHeader, keys: Sequence[tuple[int, int]]) -> None:
        self._open = lambda: _opened(av, raw, header)
        self._keys, self._jumps, self._reached = keys, True, keys[0][0]
        self._begin()

    def frame_at(self, time: int) -> Any:
        """Return the frame at a time, which must not decrease between calls. Raises DecodeError."""
        key = self._keys[max(bisect_right(self._keys, time, key=lambda key_frame: key_frame[0]) - 1, 0)]
        if self._jumps and key[0] > self._reached:
            self._file.seek(key[1], stream=self._file.streams.video[0])
            self._frames, self._frame, self._next = self._decoded(), None, None
            self._reached = key[0]
        while self._frame is None or self._frame.pts < time:
            frame = self._next or next(self._frames, None)
            self._next = None
            if frame is None:
                break
            if frame.pts > time:
                self._next = frame
                break
            self._frame = frame
            self._reached = max(self._reached, frame.pts)
        if self._frame is not None:
            return self._frame
        if not self._jumps:
            raise DecodeError("a frame of it cannot be decoded")
        # Some key frames need earlier frames in spite of their flag: decode from the beginning.
        self._jumps = False
        self.close()
        self._begin()
        return self.frame_at(time)

    def close(self) -> None:
        self._file.close()

    def _begin(self) -> None:
        self._file = self._open()
        self._frames, self._frame, self._next = self._decoded(), None, None
        self._reached = self._keys[0][0]

    def _decoded(self) -> Iterator[Any]:
        for frame in self._file.decode(video=0):
            if frame.is_corrupt:
                raise DecodeError(f"the frame at {float(frame.time or 0):.2f} s is damaged")
            if frame.pts is not None:
                yield frame


def _upright(frame: Any, header: VideoHeader) -> torch.Tensor:
    image = torch.from_numpy(frame.to_ndarray(format="rgb24", threads=1)).permute(2, 0, 1)
    image = torch.rot90(image, -header.turns, (1, 2))
    if tuple(image.shape) != (3, header.height, header.width):
        raise DecodeError(f"decoded to {tuple(image.shape)}, but its header says {(3, header.height, header.width)}")
    return image
