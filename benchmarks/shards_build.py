"""Processor time of `shards build`, compared with copying the same samples by webdataset's ShardWriter.

    python benchmarks/shards_build.py --samples 2000 --rounds 5

A folder of files of 40 to 160 KB next to a LLaVA JSON, read from the page cache. Each round runs both, so that both see
the same load. The files are no images, but have the header of one, since nothing decodes them.

Two numbers of samples are built: the time of one more sample follows from their difference, without the fixed time of a
build (locks, small files). User and system time are added; imports and the start of a process are in neither number.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import webdataset
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.build.build import Settings, build_shards
from data.build.find import find_source
from data.rows.samples import Columns

PARTS = 10
"""The smaller build has this part of the samples."""


def make(folder: Path, samples: int) -> list[dict]:
    """The records, whose files are in `folder`."""
    rng = random.Random(0)
    buffer = io.BytesIO()
    Image.fromarray(np.zeros((480, 640, 3), dtype=np.uint8)).save(buffer, "JPEG")
    head = buffer.getvalue()
    turns = [{"from": "human", "value": "<image>\nWhat is this?"}, {"from": "gpt", "value": "word " * 60}]
    (folder / "images").mkdir(parents=True)
    records = []
    for number in range(samples):
        name = f"{number:08d}.jpg"
        (folder / "images" / name).write_bytes(head + rng.randbytes(rng.randint(40_000, 160_000)))
        records.append({"id": f"{number}", "image": name, "conversations": turns})
    for count in (samples // PARTS, samples):
        (folder / f"{count}.json").write_text(json.dumps(records[:count]))
    return records


def by_webdataset(folder: Path, records: list[dict], to: Path) -> None:
    with webdataset.ShardWriter(str(to / "train-%06d.tar"), maxcount=1000, maxsize=1e9, verbose=0) as writer:
        for number, record in enumerate(records):
            raw = (folder / "images" / record["image"]).read_bytes()
            writer.write({"__key__": f"{number:06d}", "jpg": raw, "json": record})


def by_shards_build(folder: Path, records: list[dict], to: Path) -> None:
    source = find_source(folder / f"{len(records)}.json", Columns(), media=folder / "images")
    build_shards(source, to, Settings(per_shard=1000))


HOW: dict[str, Callable[[Path, list[dict], Path], None]] = {
    "webdataset.ShardWriter": by_webdataset,
    "shards build": by_shards_build,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    few, many = args.samples // PARTS, args.samples
    whole: dict[str, list[float]] = {name: [] for name in HOW}
    more: dict[str, list[float]] = {name: [] for name in HOW}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        records = make(folder, many)
        for name in HOW:
            seconds(name, folder, records[:few])  # imports, and files into the page cache
        for _ in range(args.rounds):
            for name in HOW:
                small, large = seconds(name, folder, records[:few]), seconds(name, folder, records)
                whole[name].append(large / many * 1e6)
                more[name].append((large - small) / (many - few) * 1e6)
    print(f"{many} and {few} samples of 100 KB, {args.rounds} rounds; us of processor time a sample")
    for what, times in (("one more sample", more), ("all, by their number", whole)):
        print(what)
        base = times["webdataset.ShardWriter"]
        for name, own in times.items():
            ratios = [one / other for one, other in zip(base, own, strict=True)]
            print(
                f"  {name:<24}{statistics.median(own):>8.1f}  (from {min(own):.1f} to {max(own):.1f})"
                f"{statistics.median(ratios):>8.2f} x  (from {min(ratios):.2f} to {max(ratios):.2f})"
            )


def seconds(name: str, folder: Path, records: list[dict]) -> float:
    """Of the processor, user and system, that writing the records takes."""
    to = folder / "out"
    to.mkdir()
    start = time.process_time()
    HOW[name](folder, records, to)
    end = time.process_time()
    shutil.rmtree(to)
    return end - start


if __name__ == "__main__":
    main()
