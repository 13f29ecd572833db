"""How even the work of encoder ranks is, by arithmetic alone: samples in order, and single images dealt by their work.

    python benchmarks/load_balance.py [--seeds 4] [--dp 64]

Sizes of images are drawn: documents of 1 to 4 megapixels; photos of 0.3 to 12, reduced to 1; interleaved samples of 0
to 12 images of 0.1 to 4, reduced to 1; one video of 4 to 384 pairs of frames of 0.2 megapixels, divided by pairs or
whole. Patches are 14 pixels wide. The work of an image or pair of n patches is n + n^2 / 7680, that of a layer of width
1280 with attention over the whole image. A step has 16 microbatches. Each cell is the work of
the busiest rank over the mean: summed over the passes of a step, in each of which ranks wait for each other, and in
brackets over the whole step. A pass is a microbatch, or k of them for a frozen encoder (`prefetch_microbatches=k`).
Processor time is that of all routes of a step.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.order.load_balance import MediaItems, routes_of
from data.order.packing import whole_work
from data.order.step_plan import plan_in_order

MICROBATCHES = 16
PAIR = 1 / 7680
WAYS = {
    "`samples`": (False, 1),
    "`images`": (True, 1),
    **{f"`images`, k={together}": (True, together) for together in (2, 4, 8)},
}


def patches(megapixels: np.ndarray) -> np.ndarray:
    """Patches of square images whose sides are multiples of two patches."""
    return (np.maximum(np.round(np.sqrt(megapixels * 1e6) / 28), 1) * 2).astype(np.int64) ** 2


def log_uniform(draw: np.random.Generator, low: float, high: float, size: int) -> np.ndarray:
    """Sizes whose logarithms are uniform."""
    return np.exp(draw.uniform(np.log(low), np.log(high), size))


SIZES: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "documents": lambda draw: patches(log_uniform(draw, 1, 4, 1)),
    "photos": lambda draw: patches(np.minimum(log_uniform(draw, 0.3, 12, 1), 1.0)),
    "interleaved": lambda draw: patches(np.minimum(log_uniform(draw, 0.1, 4, int(draw.integers(0, 13))), 1.0)),
    "videos": lambda draw: np.repeat(patches(np.array([0.2])), int(log_uniform(draw, 4, 384, 1)[0])),
}
"""Patches of each image, or pair of frames, of a sample."""
WHOLE = "videos, whole"


def items_of(samples: list[np.ndarray], kind: str) -> MediaItems:
    """Media items of samples with images of these patches."""
    counts = np.array([len(images) for images in samples])
    places, numbers = np.repeat(np.arange(len(samples)), counts), np.concatenate([*map(np.arange, counts)])
    loads = np.concatenate(samples)
    work = whole_work(loads, loads**2, PAIR)
    if kind == WHOLE:
        loads, work = (np.add.reduceat(values, np.cumsum(counts) - counts) for values in (loads, work))
        places, numbers, counts = np.arange(len(samples)), np.zeros_like(counts), np.ones_like(counts)
    parts = np.repeat(counts, counts) if kind == "videos" else np.ones_like(places)
    return MediaItems(places, numbers, loads // 4, loads, work, parts)


def main() -> None:
    """Print a row of a table for each kind of sizes and number of samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4, help="steps of each kind")
    parser.add_argument("--dp", type=int, default=64, help="data-parallel ranks of both modules")
    args = parser.parse_args()
    print(f"| sizes | samples a rank | {' | '.join(WAYS)} | images a step | ms a step, `images` |")
    print("|---" * (len(WAYS) + 4) + "|")
    for kind, sizes in (SIZES | {WHOLE: SIZES["videos"]}).items():
        for per_rank in (1, 4):
            cells, times, counts = {way: [] for way in WAYS}, [], []
            for seed in range(args.seeds):
                draw = np.random.default_rng(seed)
                size = per_rank * args.dp * MICROBATCHES
                items = items_of([sizes(draw) for _ in range(size)], kind)
                plan = plan_in_order(0, size, per_rank * args.dp, args.dp, 1)
                counts.append(len(items))
                for way, (by_items, together) in WAYS.items():
                    began = time.thread_time()
                    routes = routes_of(items, plan, args.dp, by_items, together)
                    if (by_items, together) == (True, 1):
                        times.append((time.thread_time() - began) * 1e3)
                    work = np.array([each.work(args.dp) for each in routes])
                    passes = work.reshape(-1, together, args.dp).sum(axis=1)
                    whole = work.sum(axis=0)
                    cells[way].append(
                        (passes.max(axis=1).sum() / passes.mean(axis=1).sum(), whole.max() / whole.mean())
                    )
            means = [np.mean(cells[way], axis=0) for way in WAYS]
            shown = " | ".join(f"{of_passes:.2f} ({of_step:.2f})" for of_passes, of_step in means)
            print(
                f"| {kind} | {per_rank} | {shown} | {statistics.mean(counts):,.0f} | {statistics.median(times):.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
