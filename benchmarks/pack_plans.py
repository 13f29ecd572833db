"""Packs of a step by arithmetic alone: how full rows are, how even the work of ranks is, what a plan costs.

    python benchmarks/pack_plans.py [--seeds 20] [--hidden 1024]

Texts are lognormal, 350 tokens on average and cut at 2,048; mixed ones have 0 to 4 images of 144 to 576 tokens. For
each number of samples and ranks: the least fill, and the most that the busiest rank has over the mean, over all steps,
in tokens, in the squares of lengths (attention), and in the whole work of a language model of that hidden size. No
dealing can have squares below the bound, a rank's with the longest sample alone. Processor time is of a whole plan.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.order.packing import Packing, plan_in_packs
from data.order.step_plan import StepPlan

STEPS = [(256, 1), (256, 4), (256, 8), (256, 16), (1024, 16), (1024, 64), (4096, 64)]
"""(samples of a step, data-parallel ranks)."""


def main() -> None:
    """Print a row of a table for each kind of step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="steps of each kind")
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size, by which tokens and squares are weighed")
    args = parser.parse_args()
    pair = 1 / (12 * args.hidden)
    print(
        "| samples, ranks | budget | kind | fill | tokens | whole work | squares: median, most | bound | us a sample |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for samples, ranks in STEPS:
        for budget in (2048, 8192):
            for kind in (text, mixed):
                lengths = [kind(samples, np.random.default_rng(seed)) for seed in range(args.seeds)]
                rows = np.array([measured(one, ranks, Packing(budget, 8, pair=pair)) for one in lengths])
                fill, tokens, whole, squares, bound, cost = rows.T
                print(
                    f"| {samples:,}, {ranks} | {budget:,} | {kind.__name__} | {fill.min():.3f} | {tokens.max():.2f} "
                    f"| {whole.max():.2f} | {statistics.median(squares):.2f}, {squares.max():.2f} "
                    f"| {bound.max():.2f} | {statistics.median(cost):.1f} |"
                )


def measured(lengths: np.ndarray, ranks: int, packing: Packing) -> tuple[float, ...]:
    """Fill, busiest ranks in tokens, whole work and squares, the bound of these, microseconds a sample."""
    began = time.thread_time()
    plan = plan_in_packs(0, lengths, ranks, packing)
    cost = (time.thread_time() - began) / len(lengths) * 1e6
    squares = lengths**2
    evenness = [busiest(plan, work) for work in (lengths, lengths + packing.pair * squares, squares)]
    bound = max(1.0, squares.max() * ranks / squares.sum())
    return lengths.sum() / plan.positions, *evenness, bound, cost


def busiest(plan: StepPlan, work: np.ndarray) -> float:
    """The most over the mean."""
    of_ranks = sum(np.array([work[share.places].sum() for share in shares]) for shares in plan.shares)
    return of_ranks.max() / of_ranks.mean()


def text(samples: int, draw: np.random.Generator) -> np.ndarray:
    """Tokens of texts."""
    return draw.lognormal(np.log(350) - 0.9**2 / 2, 0.9, samples).clip(8, 2048).astype(np.int64)


def mixed(samples: int, draw: np.random.Generator) -> np.ndarray:
    """Tokens of texts with images."""
    images = draw.choice([0, 1, 2, 4], samples, p=[0.2, 0.6, 0.15, 0.05])
    sizes = [draw.choice([144, 196, 256, 324, 400, 484, 576], each).sum() for each in images]
    return np.minimum(text(samples, draw) + np.array(sizes), 2048)


if __name__ == "__main__":
    main()
