"""Time to plan a step, for each sample of the global batch: what the index says of all its samples, on every rank.

    python benchmarks/plan_step.py [--samples 4096] [--shards 200]      # makes shards of images in a temporary folder

Compared are one call of `ShardDataset.plan_step` with the plan of the microbatches, and what it says from the metadata
of single samples, one after the other, which the plan was made of before. Processor time of this thread.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.order.step import Batching
from data.order.step_plan import Padding
from data.samples.shard_dataset import ShardDataset
from data.samples.text_lengths import TextLengths
from mimo_train.config.compose import load
from mimo_train.inputs.datasets import media_of, tokenizer_of
from tests.tars import write_tar
from tests.unit.data.helpers import chat, encode_image


def main() -> None:
    """Print microseconds a sample."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=4096, help="of a step")
    parser.add_argument("--shards", type=int, default=200)
    parser.add_argument("--of-shard", type=int, default=100, help="samples of a shard")
    args = parser.parse_args()
    cfg = load("vlm_digits", ("encoder@modules.images.encoder=vit_tiny_native", "modules.images.projector.merge=2"))
    with tempfile.TemporaryDirectory() as folder:
        make_shards(Path(folder), args.shards, args.of_shard)
        tokenizer = tokenizer_of(cfg)
        began = time.thread_time()
        data = ShardDataset(folder, tokenizer=tokenizer, sequence_length=2048, media=media_of(cfg))
        print(f"{len(data)} samples in {args.shards} shards indexed and opened: {time.thread_time() - began:.2f} s")
        began = time.thread_time()
        list(TextLengths(data).build(processes=1))
        print(f"texts counted: {(time.thread_time() - began) / len(data) * 1e6:.1f} us a text")
        began = time.thread_time()
        TextLengths(data).serve()
        print(f"lengths read: {(time.thread_time() - began) * 1e3:.1f} ms")
        began = time.thread_time()
        data = ShardDataset(folder, tokenizer=tokenizer, sequence_length=2048, media=media_of(cfg))
        TextLengths(data).serve()
        print(f"opened again, with lengths: {(time.thread_time() - began) * 1e3:.1f} ms")
        compare(data, args.samples)


def compare(data: ShardDataset, size: int) -> None:
    """Microseconds a sample of both ways, over ten steps each, one after the other."""
    batching = Batching(size, size // 16, None, 4, Padding(64))
    ways = {"metadata of single samples": [], "plan_step": [], "order and microbatches of it": []}
    for step in range(11):
        first = step * size
        began = time.thread_time()
        metas = [data.meta(number) for number in range(first, first + size)]
        ways["metadata of single samples"].append(time.thread_time() - began)
        began = time.thread_time()
        samples = data.plan_step(first, size)
        ways["plan_step"].append(time.thread_time() - began)
        began = time.thread_time()
        plan = batching.plan(first, size, samples.lengths, 2048)
        for at in range(len(plan.shares)):
            places = plan.places[at]
            for of in (samples.tokens, samples.loads, samples.pairs):
                of["images"][places].tolist()
        ways["order and microbatches of it"].append(time.thread_time() - began)
        assert [sum(meta.tokens["images"]) for meta in metas] == samples.tokens["images"].tolist()
    for name, seconds in ways.items():
        found = [second / size * 1e6 for second in seconds[1:]]
        print(
            f"{name}: {statistics.median(found):.2f} us a sample ({min(found):.2f} to {max(found):.2f}), step of {size}"
        )


def make_shards(folder: Path, shards: int, of_shard: int) -> None:
    """Images of many sizes and texts of lognormal length."""
    draw, generator = random.Random(0), np.random.default_rng(0)
    images = [encode_image(draw.randrange(16, 200), draw.randrange(16, 200), seed=n) for n in range(200)]
    lengths = generator.lognormal(5.5, 0.9, shards * of_shard).astype(int).tolist()
    for shard in range(shards):
        members = []
        for n in range(shard * of_shard, (shard + 1) * of_shard):
            number = draw.choice([0, 1, 1, 1, 2])
            members += [(f"{n:07d}.{at}.jpg", draw.choice(images)) for at in range(number)]
            members.append((f"{n:07d}.json", chat("<image>" * number + "q", "a" * (1 + lengths[n]))))
        write_tar(folder / f"s-{shard:06d}.tar", members)


if __name__ == "__main__":
    main()
