"""Reading of parquet files as they are, next to tars of the same samples: samples, bytes and memory, by order.

    python benchmarks/parquet_rows.py --samples 2000 --rounds 2

JPEGs of about 115 KB in row groups of 100, as Hugging Face writes them, and the shards that `shards build` makes of
them. A reader keeps row groups of 32 MB, so that the files do not fit. Each way reads half an epoch in a process of its
own, with two threads that decode; rounds take turns.
"""

from __future__ import annotations

import argparse
import io
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

ROWS, CACHE, STEP = 100, 32 << 20, 100
WAYS = (("tars", 1), ("rows", 1), ("rows", ROWS))


def make(folder: Path, samples: int) -> None:
    """Write the parquet file and the shards."""
    import pyarrow
    import pyarrow.parquet

    from data.build.build import Settings, build_shards
    from data.build.find import find_source
    from data.rows.samples import Columns

    rng = np.random.default_rng(0)
    small = Image.fromarray(rng.integers(0, 256, (60, 80, 3), dtype=np.uint8))
    base, images = np.asarray(small.resize((640, 480), Image.Resampling.BICUBIC)).astype(int), []
    for _ in range(samples):
        buffer, noise = io.BytesIO(), rng.integers(-12, 12, base.shape)
        Image.fromarray(np.clip(base + noise, 0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=88)
        images.append({"bytes": buffer.getvalue(), "path": None})
    (folder / "rows").mkdir()
    table = pyarrow.table({"image": images, "caption": ["A picture of something. " * 10] * samples})
    pyarrow.parquet.write_table(table, folder / "rows" / "x.parquet", row_group_size=ROWS)
    build_shards(find_source(folder / "rows", Columns()), folder / "tars", Settings(seed=None))


def read(folder: Path, way: str, block: int) -> None:
    """Read half an epoch, and print what it took."""
    from data.loader import StepLoader
    from data.order.step import Batching, Reader
    from data.rows import row_reader
    from data.samples.media_spec import Media
    from data.samples.shard_dataset import ShardDataset
    from data.text.tokens import build_tokenizer

    row_reader.CACHE_BYTES = CACHE
    media = Media("images", "image", "<image>", lambda height, width: 4, lambda height, width: (224, 224))
    tokenizer = build_tokenizer("bytes", ["<image>"])
    shards = str(folder / ("rows" if way == "rows" else "tars/train"))
    started = time.perf_counter()
    data = ShardDataset(shards, tokenizer=tokenizer, sequence_length=512, media=[media], shuffle_block=block)
    opened = time.perf_counter() - started
    count, cpu, started = len(data) // 2 // STEP * STEP, time.process_time(), time.perf_counter()
    readers = [Reader("language", 0, 1), Reader("images", 0, 1)]
    with StepLoader(data, Batching(STEP, STEP // 4), readers, workers=2, limit=count // STEP) as loader:
        for _ in loader:
            pass
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    kilobytes = sum(data.reader.bytes_read.values()) / count / 1e3
    print(
        f"{way}, blocks of {block}: opened in {opened:.2f} s, {count / seconds:.0f} samples/s, "
        f"{1e3 * cpu / count:.1f} ms of CPU and {kilobytes:.0f} KB a sample, peak {peak:.0f} MB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--read", nargs=3, metavar=("FOLDER", "WAY", "BLOCK"), help="read one way, in this process")
    args = parser.parse_args()
    if args.read:
        return read(Path(args.read[0]), args.read[1], int(args.read[2]))
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), args.samples)
        for _ in range(args.rounds):
            for way, block in WAYS:
                subprocess.run([sys.executable, __file__, "--read", folder, way, str(block)], check=True)


if __name__ == "__main__":
    main()
