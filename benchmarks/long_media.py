"""Processor time and peak memory of long videos and audio files.

    OMP_NUM_THREADS=1 python -P benchmarks/long_media.py [--rounds 4] [--torchcodec PYTHON]

- A video of 10 minutes, 720p, H.264 with B-frames and a key frame every 250 frames, gives 32 frames by number:
  `decode_frames`, which seeks, and a complete decode by PyAV, in turns. PYTHON is of an environment with torchcodec,
  whose `get_frame_at` is a third way.
- 64 frames of this video become the input of a model by the processor of its type in transformers: resized one by one
  as they are decoded, and all at once.
- A film of 2 hours, 240p, gives two frames a second, 14,400, by `decode_frames`.
- An hour of stereo at 48 kHz (FLAC) becomes mono at 16 kHz by `decode_audio`.

Each way has a process of its own and one thread.
"""

import argparse
import io
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

RATE, MINUTE = 30, 60 * 30
TYPES = ("internvl",)
AT_ONCE = ", at once"


def main() -> None:
    """Print a line for each video and way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--torchcodec", metavar="PYTHON")
    parser.add_argument("--way", nargs=3, metavar=("WAY", "FILE", "COUNT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(args.way[0], Path(args.way[1]), int(args.way[2]))))
        return
    ways = {"decode_frames": sys.executable, "complete": sys.executable}
    if args.torchcodec:
        ways["torchcodec"] = args.torchcodec
    with tempfile.TemporaryDirectory() as folder:
        video, film, sound = (Path(folder, name) for name in ("video.mp4", "film.mp4", "sound.flac"))
        make(video, 720, 1280, minutes=10)
        make(film, 240, 432, minutes=120)
        make_sound(sound)
        for file, count, names in (
            (video, 32, [*ways]),
            (video, 64, [kind + way for kind in TYPES for way in (AT_ONCE, "")]),
            (film, 14400, ["decode_frames"]),
            (sound, 1, ["decode_audio"]),
        ):
            results: dict[str, list[dict[str, float]]] = {way: [] for way in names}
            for _ in range(args.rounds if count == 32 else 1):
                for way in names:
                    python = ways.get(way, sys.executable)
                    command = [python, "-P", __file__, "--way", way, str(file), str(count)]
                    result = subprocess.run(command, check=True, stdout=subprocess.PIPE)
                    results[way].append(json.loads(result.stdout))
            print(f"{file.name}, {file.stat().st_size / 1e6:.0f} MB: {count}")
            for way, values in results.items():
                seconds = [value["seconds"] for value in values]
                peak = max(value["peak"] for value in values)
                spread = f"({min(seconds):.2f} to {max(seconds):.2f})"
                print(f"  {way:25} {statistics.median(seconds):8.2f} s {spread}, peak {peak:.0f} MB above the file")


def make(path: Path, height: int, width: int, minutes: int) -> None:
    """Write a video: a minute of a pattern that moves, again and again."""
    import av
    import numpy as np

    noise = np.random.default_rng(1)
    coarse = noise.integers(16, 235, (height // 8, width // 8), dtype=np.uint8)
    plane = np.pad(coarse.repeat(16, 0).repeat(16, 1), 8)
    minute = io.BytesIO()
    with av.open(minute, "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=RATE, options={"preset": "veryfast", "g": "250", "threads": "1"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        colours = np.full((height // 2, width), 128, dtype=np.uint8)
        for at in range(MINUTE):
            down, right = at * 3 % height, at * 5 % width
            image = np.concatenate([plane[down : down + height, right : right + width], colours])
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="yuv420p")
            frame.pts, frame.time_base = at, Fraction(1, RATE)
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    with av.open(str(path), "w") as out:
        track = None
        for number in range(minutes):
            minute.seek(0)
            with av.open(minute) as file:
                track = track or out.add_stream_from_template(file.streams.video[0])
                for packet in file.demux(video=0):
                    if packet.dts is not None:
                        shift = int(60 * number / packet.time_base)
                        packet.pts, packet.dts, packet.stream = packet.pts + shift, packet.dts + shift, track
                        out.mux(packet)


def make_sound(path: Path) -> None:
    """Write an hour of noise."""
    import numpy as np
    import soundfile

    with soundfile.SoundFile(path, "w", 48000, 2, format="FLAC") as file:
        for minute in range(60):
            file.write(np.random.default_rng(minute).normal(scale=0.05, size=(48000 * 60, 2)).astype(np.float32))


def measure(way: str, path: Path, count: int) -> dict[str, float]:
    """Return the seconds for `count` evenly spaced frames, and the peak memory above that before, in MB."""
    raw = path.read_bytes()
    ways: dict[str, Callable[[bytes, int], Iterator[Any]]] = {
        "decode_frames": _ours,
        "complete": _complete,
        "torchcodec": _torchcodec,
        "decode_audio": _audio,
    }
    if way == "decode_audio":
        import torchaudio  # noqa: F401, its import is not measured
    elif way not in ways:
        ways[way] = partial(_read, _reader(way.removesuffix(AT_ONCE), count, way.endswith(AT_ONCE)))
    else:
        next(ways[way](raw, 1))
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    assert sum(1 for _ in ways[way](raw, count)) == count
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"seconds": time.process_time() - start, "peak": peak / 1024}


def _numbers(frames: int, count: int) -> list[int]:
    return [at * frames // count for at in range(count)]


def _ours(raw: bytes, count: int) -> Iterator[Any]:
    from data.media.headers import read_video_header, reader_of
    from data.media.options import Bounds
    from data.media.video import decode_frames

    frames = read_video_header(reader_of(raw), len(raw)).frames
    yield from decode_frames(raw, _numbers(frames, count), Bounds(seconds=1e6))


def _complete(raw: bytes, count: int) -> Iterator[Any]:
    import av

    with av.open(io.BytesIO(raw)) as file:
        stream = file.streams.video[0]
        stream.codec_context.thread_count = 1
        wanted = set(_numbers(stream.frames, count))
        for number, frame in enumerate(file.decode(stream)):
            if number in wanted:
                yield frame.to_ndarray(format="rgb24", threads=1)


def _reader(kind: str, count: int, at_once: bool) -> Any:
    """Return the video half of a processor that chooses `count` frames."""
    from encoders.transformers_media.processor import MediaProcessor
    from encoders.transformers_media.videos import VideoProcessor
    from tests.dist.all_types import processors
    from tests.dist.all_types.configs import tiny_config

    with tempfile.TemporaryDirectory() as folder:
        processor = processors.tiny_processor(kind, tiny_config(kind))
        processor.save_pretrained(folder)
        pad = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
        reader = VideoProcessor(MediaProcessor(folder, "image", pad), {"num_frames": count})
    if at_once:
        reader._resizes_frames = False
    assert reader._resizes_frames != at_once, f"{kind} does not resize frame by frame"
    return reader


def _read(reader: Any, raw: bytes, count: int) -> Iterator[Any]:
    from data.media.options import Bounds
    from data.media.video import decode_frames

    extent = 720, 1280, 10 * MINUTE, RATE, 1
    numbers = reader.frames(*extent)
    assert len(numbers) == count, f"{len(numbers)} frames"
    item = reader.read(decode_frames(raw, numbers, Bounds(seconds=1e6)), extent)
    yield from [item] * count


def _audio(raw: bytes, count: int) -> Iterator[Any]:
    from data.media.audio import decode_audio

    yield decode_audio(raw, 16000)


def _torchcodec(raw: bytes, count: int) -> Iterator[Any]:
    from torchcodec.decoders import VideoDecoder

    decoder = VideoDecoder(raw, num_ffmpeg_threads=1)
    for number in _numbers(len(decoder), count):
        yield decoder.get_frame_at(number).data


if __name__ == "__main__":
    main()
