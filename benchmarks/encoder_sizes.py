"""Processor time of an encoder's step, forward and backward, on 16 images of 16 sizes: all in one pass, and one pass
for each size; beside 16 images of one size with about as many patches. The ways alternate on one process.

    OMP_NUM_THREADS=1 python -P benchmarks/encoder_sizes.py [--rounds 40] [--sides 2 9] [key=value ...]

`--sides`: the sides of images are from so many to so many tokens of the sequence. Keys are those of the config
`vlm_digits` with the encoder `vit_tiny_native`.
"""

import argparse
import random
import statistics
import tempfile
import time
from typing import Any

from mimo_train.config.compose import load

IMAGES = 16
TOGETHER, APART, ONE_SIZE = "16 sizes, one pass", "16 sizes, a pass for each", "one size"


def main() -> None:
    """Print the seconds of each way, and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--sides", type=int, nargs=2, default=(2, 9))
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    native = ("layout=one_process", "encoder@modules.images.encoder=vit_tiny_native", "run.device=cpu")
    with tempfile.TemporaryDirectory() as folder:
        cfg = load("vlm_digits", (*native, f"run.dir={folder}/run", *args.overrides))
        measure(cfg, args.rounds, range(args.sides[0], args.sides[1] + 1))


def measure(cfg: Any, rounds: int, sides: range) -> None:
    """Steps of all ways in turn; the first three rounds are not counted."""
    import torch
    from megatron.core.utils import unwrap_model

    from mimo_train.layout.run import resolve
    from mimo_train.training.step.pipeline import build_parts, start_processes

    run = resolve(cfg)
    parts = build_parts(run, *start_processes(run.cfg))
    (model,) = parts.pipeline.model
    encoder = unwrap_model(model.modality_submodules["images"]).encoders["images"]
    unit = encoder.spec.patch_size * encoder.merge
    draw = random.Random(3)
    shapes = draw.sample([(rows, columns) for rows in sides for columns in sides], IMAGES)
    mean = sum(rows * columns for rows, columns in shapes) / IMAGES
    row = round(mean**0.5)
    torch.manual_seed(1)
    images = [torch.randint(0, 256, (3, rows * unit, columns * unit)).to(torch.uint8) for rows, columns in shapes]
    alike = [torch.randint(0, 256, (3, row * unit, round(mean / row) * unit)).to(torch.uint8) for _ in shapes]
    ways = {TOGETHER: [images], APART: [[one] for one in images], ONE_SIZE: [alike]}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for at in range(rounds + 3):
        for name in draw.sample(list(ways), len(ways)):
            start = time.process_time()
            encoder.zero_grad()
            torch.cat([encoder(part) for part in ways[name]]).square().sum().backward()
            if at >= 3:
                seconds[name].append(time.process_time() - start)
    print(f"{encoder.spec.num_layers} layers of {encoder.spec.hidden_size}, merge {encoder.merge}")
    print(f"{sum(encoder._tokens(tuple(one.shape[-2:])) for one in images)} patches of {IMAGES} sizes, ", end="")
    print(f"{sum(encoder._tokens(tuple(one.shape[-2:])) for one in alike)} of one; milliseconds, {rounds} rounds")
    for name, values in seconds.items():
        low, middle, high = (1000 * one for one in statistics.quantiles(values, n=4))
        print(f"{name:27} median {middle:8.2f}   quartiles {low:8.2f} {high:8.2f}")
    for over, under in ((APART, TOGETHER), (TOGETHER, ONE_SIZE)):
        ratios = [one / other for one, other in zip(seconds[over], seconds[under], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        redrawn = sorted(statistics.median(draw.choices(ratios, k=rounds)) for _ in range(2000))
        print(
            f"{over} / {under}: median {middle:.2f}, 95 % of redraws {redrawn[50]:.2f} to {redrawn[-51]:.2f}, ", end=""
        )
        print(f"quartiles of rounds {low:.2f} {high:.2f}")


if __name__ == "__main__":
    main()
