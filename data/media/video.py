"""Decode frames of videos (MP4, MOV, WebM and Matroska) with PyAV (the extra `video`).

The container is given to libavformat: by itself it may take a file for a list of other files, or URLs, to open.
"""

from __future__ import annotations

import io
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import pairwise
from typing import Any

import torch

from data.errors import DecodeError, reason_of
from data.media.audio_files import import_av, open_no_other_file
from data.media.headers import VideoHeader, read_video_header, reader_of
from data.media.options import BOUNDS, Bounds
from data.media.video_packets import Packets, scan_packets, video_stream

_CODED_MORE = 1 << 20  # pixels that are coded around those of a frame


def decode_frames(raw: bytes, numbers: Sequence[int], bounds: Bounds = BOUNDS) -> Iterator[torch.Tensor]:
    """Yield frames of a video by their numbers in the order of presentation, uint8 [3, H, W], RGB, upright.

    Memory for a few frames is needed, for any length and any number of them. It seeks to the key frame before a frame
    if that skips others.

    Args:
        numbers: from 0, ascending; one may repeat.

    Raises:
        DecodeError: it is damaged, above its bounds, or of another number or size of frames than its header says.
        MemoryShortage, MissingLibrary: this machine cannot decode it.
    """
    assert all(before <= after for before, after in pairwise(numbers)), f"frames {numbers} are not ascending"
    return _decode(raw, lambda packets, _: numbers, bounds, exact=True)


def decode_video(
    raw: bytes, count: int, bounds: Bounds = BOUNDS, parts: Sequence[int] | None = None
) -> Iterator[torch.Tensor]:
    """Yield the frames at the middle of `count` equal parts of a video, as `decode_frames` does; only of `parts`, from
    0 and ascending, if given.

    A long frame may repeat. The frame before takes the place of one that the decoder leaves out.
    """

    parts = range(count) if parts is None else parts

    def middles(packets: Packets, unit: Fraction) -> list[int]:
        middles = (Fraction(2 * part + 1, 2 * count) * packets.seconds / unit for part in parts)
        # the last frames that have started by then
        return [bisect_right(packets.times, packets.times[0] + middle) - 1 for middle in middles]

    return _decode(raw, middles, bounds, exact=False)


def _decode(
    raw: bytes, choose: Callable[[Packets, Fraction], Sequence[int]], bounds: Bounds, exact: bool
) -> Iterator[torch.Tensor]:
    """Yield the frames whose numbers `choose` returns, from the packets and the unit of their times in seconds."""
    try:
        header = read_video_header(reader_of(raw), len(raw))
    except DecodeError as error:
        raise DecodeError(f"no header of a video that can be decoded in {len(raw)} bytes: {error}") from error
    excess = bounds.excess_of_extent("image", header.height, header.width)
    if excess := excess or bounds.excess("seconds", header.milliseconds / 1000):
        raise DecodeError(excess)
    av = import_av("videos")
    decoder = None
    try:
        with _opened(av, raw, header) as file:
            stream = video_stream(file)
            packets, unit = scan_packets(file, stream), Fraction(stream.time_base)
        times = packets.times
        if len(times) != header.frames:
            raise DecodeError(f"its header says that it has {header.frames} frames, and it has {len(times)}")
        numbers = choose(packets, unit)
        if missing := [number for number in numbers if not 0 <= number < len(times)]:
            raise DecodeError(f"it has {len(times)} frames, and none has the number {missing[0]}")
        decoder = _Decoder(av, raw, header, packets, numbers)
        for number in numbers:
            frame = decoder.frame_at(number)
            near = times[max(number - 1, 0) : number + 2]
            if exact and (frame.pts != times[number] or near.count(times[number]) > 1):
                at = f"at {float((times[number] - times[0]) * unit):.2f} s"
                raise DecodeError(f"frame {number} {at} cannot be decoded, or another one is at the same time")
            yield _upright(frame, header)
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
    file = av.open(
        io.BytesIO(raw),
        format=header.container,
        options=largest,
        io_open=open_no_other_file,
    )
    context = video_stream(file).codec_context
    context.thread_count = 1  # samples are decoded in parallel already
    context.options = {"err_detect": "explode"} | largest  # raise an error instead of concealing damage
    return file


class _Decoder:
    """Decodes a video forwards. It seeks to the next key frame if that skips frames.

    Frames of H.264 that no others need are decoded only if they are among `numbers`.
    """

    def __init__(self, av: Any, raw: bytes, header: VideoHeader, packets: Packets, numbers: Sequence[int]) -> None:
        self._open, self._error = (lambda: _opened(av, raw, header)), av.FFmpegError
        self._times, self._keys, self._seeks = packets.times, packets.keys, True
        self._wanted = {packets.times[number] for number in numbers}
        self._begin()

    def frame_at(self, number: int) -> Any:
        """Return the frame of a number, which must not decrease between calls, or the last one before it that the
        decoder does not leave out. Raises DecodeError."""
        if self._seeks:
            # After a seek, frames may need earlier ones in spite of the key frame: decode from the beginning then.
            with suppress(DecodeError, self._error):
                frame = self._advance(number)
                if frame is not None and frame.pts == self._times[number]:
                    return frame
            self._seeks = False
            self.close()
            self._begin()
        frame = self._advance(number)
        if frame is None:
            raise DecodeError(f"frame {number} cannot be decoded")
        return frame

    def close(self) -> None:
        self._file.close()

    def _begin(self) -> None:
        self._file = self._open()
        self._restart(-1)

    def _restart(self, reached: int) -> None:
        self._frames, self._reached = self._decoded(), reached
        self._frame: Any = None
        self._next: Any = None

    def _advance(self, number: int) -> Any:
        """Return the last frame up to a number, or None."""
        time = self._times[number]
        place = bisect_right(self._keys, time) - 1
        if self._seeks and place >= 0:
            before = bisect_left(self._times, self._keys[place]) - 1
            if before > self._reached:
                self._file.seek(self._keys[place], stream=video_stream(self._file))
                self._restart(before)
        while self._frame is None or self._frame.pts < time:
            frame = self._next or next(self._frames, None)
            self._next = None
            if frame is None:
                break
            if frame.pts > time:
                self._next = frame
                break
            self._frame = frame
        self._reached = max(self._reached, number)
        return self._frame

    def _decoded(self) -> Iterator[Any]:
        stream = video_stream(self._file)
        context = stream.codec_context
        skips = self._seeks and context.name == "h264"
        for packet in self._file.demux(stream):
            if skips:
                context.skip_frame = "DEFAULT" if packet.pts in self._wanted else "NONREF"
            for frame in packet.decode():
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
