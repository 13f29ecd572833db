"""Tokens per second of a GPT on texts of lognormal length: in rows of `data.sequence_length`, in rows as long as the
longest of a microbatch of neighbours, in microbatches of similar lengths, and packed. Steps of these ways alternate on
one process.

    OMP_NUM_THREADS=1 python benchmarks/padding.py [--rounds 3] [key=value ...]
    ... benchmarks/padding.py --config mixed_tiny       # another config, on its demo: images, sounds and texts

A round is one step of each way, on the same samples. Processor time of the process, so that other work on the machine
counts less.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.demo.make import make_demo
from mimo_train.config.compose import load
from mimo_train.config.schema import ConfigContainer

NEIGHBOURS = "longest of neighbours"
"""No way of `data`: microbatches of samples in their order, cut behind their longest one."""

WAYS = {
    "data.pad=sequence": ("data.pad=sequence",),
    NEIGHBOURS: ("data.pad=sequence",),
    "data.pad=microbatch": (),
    "data.pack=true": ("data.pack=true",),
}


def main() -> None:
    """Print the rates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--config", default="gpt_tiny")
    parser.add_argument("--mean", type=float, default=350, help="tokens of a text on average, before the cut")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        overrides = list(args.overrides)
        if args.config == "gpt_tiny":
            make_texts(Path(folder), args.mean)
            overrides = [*GPT, f"data.shards={folder}", *overrides]
        else:
            make_demo(Path(folder) / "demo", load(args.config).data.demo)
            overrides = [f"data.shards={folder}/demo/train", *overrides]
        overrides += ["data.demo=", "data.validation_shards=", f"run.dir={folder}/run", "data.workers=0"]
        overrides += ["checkpoint.resume=never", "log.tensorboard=false", "train.eval_interval=0", "run.device=cpu"]
        cfgs = [load(args.config, (*overrides, *keys)) for keys in WAYS.values()]
        print(*map(str, args.overrides))
        measure(cfgs, args.rounds)


GPT = (
    "modules.language.llm.hidden_size=256",
    "modules.language.llm.ffn_hidden_size=768",
    "modules.language.llm.num_attention_heads=8",
    "modules.language.llm.num_layers=4",
    "data.sequence_length=2048",
    "train.global_batch_size=64",
    "train.micro_batch_size=4",
)


def measure(cfgs: list[ConfigContainer], rounds: int) -> None:
    """Forward and backward of steps of all ways in turn; the first round is not counted."""
    from mimo_train.inputs.datasets import build_dataset
    from mimo_train.inputs.padding import padding_of
    from mimo_train.layout.run import resolve
    from mimo_train.parallel.device import to_device
    from mimo_train.training.data_setup import count_texts
    from mimo_train.training.step.batches import open_loader
    from mimo_train.training.step.pipeline import build_parts, start_processes

    run = resolve(cfgs[0])
    kind, device = start_processes(run.cfg)
    parts = build_parts(run, kind, device)
    pipeline = parts.pipeline
    dataset = build_dataset(run.cfg, parts.tokenizer)
    count_texts(run, dataset)
    assert dataset.lengths is not None
    loaders = [
        open_loader(run, pipeline.groups, dataset, consumed=0, steps=rounds + 1, padding=padding_of(cfg))
        for cfg in cfgs
    ]
    for chunk in pipeline.model:
        chunk.train()
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    filled: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way, loader in zip(WAYS, loaders, strict=True):
            step = next(loader)
            pipeline.shapes.follow(step)
            for chunk in pipeline.model:
                chunk.zero_grad_buffer()
            tokens = int(
                dataset.lengths[dataset.order.rows(np.arange(step.first_sample, step.first_sample + step.size))].sum()
            )
            batches, positions = step.microbatches, step.plan.positions
            if way == NEIGHBOURS:
                batches = [cut(batch, dataset.lengths[dataset.order.rows(batch["sample_numbers"].numpy())].max())
                           for batch in batches]  # fmt: skip
                positions = sum(batch["input_ids"].numel() for batch in batches)
            began = time.process_time()
            for microbatch in batches:
                forward_backward(pipeline.model[0], to_device(microbatch, device))
            if number:
                found[way].append(tokens / (time.process_time() - began))
                filled[way].append(tokens / positions)
    for way, rates in found.items():
        said = ", ".join(f"{rate:,.0f}" for rate in rates)
        print(
            f"{way}: {statistics.median(rates):,.0f} tokens a second ({said}), {statistics.mean(filled[way]):.3f} of "
            "all positions are tokens"
        )
    packed = found["data.pack=true"]
    for way, rates in found.items():
        ratios = sorted(b / a for a, b in zip(rates, packed, strict=True))
        print(f"packed / {way}: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


def cut(batch: dict[str, Any], length: int) -> dict[str, Any]:
    """The rows of a microbatch without what is behind `length`."""
    texts = ("input_ids", "position_ids", "labels", "loss_mask")
    return {name: value[..., :length] if name in texts else value for name, value in batch.items()}


def forward_backward(model: Any, batch: dict[str, Any]) -> None:
    """One microbatch, its loss summed over tokens."""
    from mimo_train.models.documents import documents_of
    from mimo_train.training.step.forward_step import MODEL_INPUTS

    inputs = {key: batch[key] for key in MODEL_INPUTS if key in batch}
    if "modality_inputs" in inputs:
        losses, mask = model(**inputs)
    else:
        mask = inputs.pop("loss_mask")
        inputs.pop("documents", None)
        losses = model(**inputs, attention_mask=None, packed_seq_params=documents_of(batch, 1))
    (losses * mask).sum().backward()


def make_texts(folder: Path, mean: float) -> None:
    """Shards of 512 texts whose tokens are lognormal."""
    from tests.tars import write_tar

    lengths = np.random.default_rng(0).lognormal(np.log(mean) - 0.9**2 / 2, 0.9, 512).clip(8, 8192).astype(int)
    for shard in range(4):
        texts = [(f"{n:06d}.txt", b"x" * (int(lengths[n]) - 2)) for n in range(128 * shard, 128 * (shard + 1))]
        write_tar(folder / f"t-{shard}.tar", texts)


if __name__ == "__main__":
    main()
