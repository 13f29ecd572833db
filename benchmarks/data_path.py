"""The data path at scale: what a rank pays before its first step, and for the plan of each.

    python -m benchmarks.data_path start [--shards 10000] [--of-shard 100]    # texts, in a temporary folder

`start`: indexes of many shards built by one process and by as many as there are cores, one changed shard built again;
then, each in a process of its own, with the files in the page cache: the catalogue opened (all shards looked at and
compared, all checksums), the dataset opened, and the plans of steps. Memory is the private memory of the process.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.tars import write_tar
from tests.unit.data.helpers import chat

REPEATS = 7
STEP = 4096


def main() -> None:
    """Run a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["start", "opened"])
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--of-shard", type=int, default=100, help="samples of a shard")
    parser.add_argument("--folder", help="of `opened`: its shards, with their catalogue")
    args = parser.parse_args()
    if args.part == "opened":
        opened(args.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        start(Path(folder), args.shards, args.of_shard)


def start(folder: Path, shards: int, of_shard: int) -> None:
    """Build and open the catalogue of a folder."""
    from data.index.catalogue import open_catalogue
    from data.index.find_shards import find_shards
    from data.index.index_file import catalogue_path

    first = write_tar(
        folder / f"s-{0:06d}.tar", [(f"{n:09d}.json", chat("q", "a" * (n % 90))) for n in range(of_shard)]
    )
    for number in range(1, shards):
        shutil.copy(first, folder / f"s-{number:06d}.tar")
    paths = find_shards(folder)
    for processes in dict.fromkeys([1, len(os.sched_getaffinity(0))]):
        catalogue_path(first).unlink(missing_ok=True)
        began = time.monotonic()
        open_catalogue(paths, processes=processes)
        seconds = time.monotonic() - began
        print(f"built by {processes} process(es): {seconds:.1f} s, {shards * of_shard / seconds:,.0f} samples/s")
    size = catalogue_path(first).stat().st_size
    print(f"{shards * of_shard:,} samples, {size / 1e6:.1f} MB, {size / shards / of_shard:.1f} bytes a sample")
    os.utime(paths[-1])
    print(f"one changed shard: {timed(lambda: open_catalogue(paths)):.2f} s")
    for _ in range(REPEATS):
        sys.stdout.flush()
        subprocess.run([sys.executable, "-m", "benchmarks.data_path", "opened", "--folder", folder], check=True)


def opened(folder: str) -> None:
    """What a rank does, step by step."""
    import numpy as np

    from data.index.catalogue import open_catalogue
    from data.index.find_shards import find_shards
    from data.index.index_file import catalogue_path, load_file
    from data.samples.shard_dataset import ShardDataset
    from data.text.tokens import build_tokenizer

    paths = find_shards(folder)
    warm = open_catalogue(paths[:1])  # what is imported or begun once
    del warm
    before, kept = private(), []
    found = timed(lambda: find_shards(folder))
    load = timed(lambda: kept.append(load_file(catalogue_path(paths[0]), "index")))
    of_file = private() - before
    whole = timed(lambda: kept.append(open_catalogue(paths)))
    of_catalogue = private() - before
    del kept[:]
    before = private()
    tokenizer = build_tokenizer("bytes")
    data: list[ShardDataset] = []
    dataset = timed(lambda: data.append(ShardDataset(folder, tokenizer=tokenizer, sequence_length=256)))
    of_dataset = private() - before
    steps = [timed(lambda: data[0].plan_step(step * STEP, STEP)) for step in range(11)][1:]  # noqa: B023
    print(
        f"file opened {load * 1e3:.1f} ms, {of_file / 1e6:.1f} MB; catalogue {whole * 1e3:.0f} ms, "
        f"{of_catalogue / 1e6:.1f} MB; names found {found * 1e3:.0f} ms; dataset {dataset * 1e3:.0f} ms, "
        f"{of_dataset / 1e6:.1f} MB; plan {np.median(steps) / STEP * 1e6:.2f} us a sample",
        flush=True,
    )


def private() -> int:
    """Bytes of memory that this process shares with no file."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def timed(work: Callable[[], object]) -> float:
    """Processor seconds of this thread."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


if __name__ == "__main__":
    main()
