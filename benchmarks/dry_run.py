"""Dry runs of large layouts: seconds and memory of the process for each kind of rank.

    python -m benchmarks.dry_run recipes [--only NAME]      # each recipe at its 512 GPUs
    python -m benchmarks.dry_run plans [--gpus 8,64,512]    # each recipe at what `mimo-train plan` proposes for them
    python -m benchmarks.dry_run large [--gpus 2048]        # a language model of 70B with an encoder of 6B, as planned
    python -m benchmarks.dry_run world [--gpus 16384]       # the same, one kind of a world that large

Shards are made in a temporary folder: every sample has the largest medium of each encoder and a text that fills its
row; the tokenizer is that of bytes, with as many rows of the embedding as the model has. `plans` and `world` look at
whether it runs and fits, with as few microbatches in a step as fill all stages: memory is that of more. Ends with code
1 if a kind fails, or does not fit on the GPU.
"""

import argparse
import io
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from mimo_train.config.compose import RECIPES, load, shipped_configs
from mimo_train.config.schema import ConfigContainer
from mimo_train.estimate.devices import DEVICES
from mimo_train.estimate.memory import GIB
from mimo_train.estimate.parameters import embedding_rows
from mimo_train.inputs.datasets import placeholders_of
from mimo_train.layout.run import resolve
from mimo_train.preflight.dry_run.command import estimates, in_child
from mimo_train.preflight.dry_run.observation import Kind, RankFailure, RankResult, kinds_of
from mimo_train.preflight.plan.search import Request, plan
from tests.tars import write_tar
from tests.unit.data.helpers import chat, encode_image

SAMPLES = 16
"""Of a shard; a dry run goes through them again and again."""
DEVICE = DEVICES["h100"]
LARGE = (
    "recipes/llava_1_5_finetune",
    "train.global_batch_size=2048",
    "data.sequence_length=4096",
    "modules.images.freeze=[]",
    *(f"modules.language.llm.{size}" for size in (
        "num_layers=80", "hidden_size=8192", "num_attention_heads=64", "num_query_groups=8", "ffn_hidden_size=28672",
        "vocab_size=128256", "max_positions=8192")),
    *(f"modules.images.encoder.{size}" for size in (
        "num_layers=48", "hidden_size=3200", "num_attention_heads=32", "ffn_hidden_size=12800")),
)  # fmt: skip
"""Llama 3's 70B, and an encoder as wide and deep as InternViT-6B, of heads that can be divided."""


def main() -> int:
    """Run a part; 1 if a kind fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["recipes", "plans", "large", "world"])
    parser.add_argument("--gpus", type=lambda text: [int(each) for each in text.split(",")], help="numbers of GPUs")
    parser.add_argument("--only", help="one recipe")
    args = parser.parse_args()
    recipes = [args.only] if args.only else sorted(file.stem for file in (shipped_configs() / RECIPES).glob("*.yaml"))
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, (title, config, overrides, most) in enumerate(_runs(args.part, args.gpus, recipes)):
            place = Path(folder) / str(number)
            keys = (*overrides, f"data.shards={place}/shards", f"run.dir={place}/run", "data.tokenizer=bytes",
                    "data.validation_shards=", "data.pad=sequence")  # fmt: skip
            cfg = load(config, keys)
            if args.part in ("plans", "world"):
                shorten(cfg)
            make_shards(place / "shards", cfg)
            failures += dry_run(title, cfg, most)
    return int(failures > 0)


def _runs(
    part: str, gpus: list[int] | None, recipes: Sequence[str]
) -> Iterator[tuple[str, str, tuple[str, ...], int | None]]:
    """(title, config, overrides, kinds that are run: None for all)."""
    if part == "recipes":
        for name in recipes:
            layout = "images_and_sound_512" if "whisper" in name else "images_512"
            yield f"{name}, layout={layout}", f"{RECIPES}/{name}", (f"layout={layout}",), None
    elif part == "plans":
        for name in recipes:
            for number in gpus or [8, 64, 512]:
                overrides = proposed(f"{RECIPES}/{name}", (), number)
                yield f"{name}, {number} GPUs: {' '.join(overrides)}", f"{RECIPES}/{name}", overrides, None
    else:
        config, *sizes = LARGE
        number = (gpus or [2048 if part == "large" else 16384])[0]
        if part == "world":
            sizes += [f"train.global_batch_size={number}"]
        overrides = proposed(config, tuple(sizes), number)
        yield (
            f"70B + 6B, {number:,} GPUs: {' '.join(overrides)}",
            config,
            (*sizes, *overrides),
            (1 if part == "world" else None),
        )


def proposed(config: str, sizes: tuple[str, ...], gpus: int) -> tuple[str, ...]:
    """Overrides of the first proposal."""
    cfg = load(config, (*sizes, "data.tokenizer=bytes"))
    rows = embedding_rows(cfg.llm, cfg.llm.vocab_size)
    began = time.monotonic()
    found = plan(cfg, Request(gpus, 8, DEVICE, rows, dict.fromkeys(cfg.encoders, 1.0), top=1))
    print(f"\nplanned in {time.monotonic() - began:.1f} s", flush=True)
    return tuple(found.proposals[0].candidate.overrides(cfg))


def shorten(cfg: ConfigContainer) -> None:
    """As few microbatches in a step as are under way at once."""
    language = cfg.language.layout
    stages = language.pp * min(language.vpp, 2) + max((module.layout.pp for module in cfg.encoders.values()), default=0)
    number = -(-stages // language.pp) * language.pp
    whole = cfg.train.micro_batch_size * language.dp
    cfg.train.global_batch_size = min(cfg.train.global_batch_size, whole * number)


def dry_run(title: str, cfg: ConfigContainer, most: int | None) -> int:
    """Run the kinds of a layout and print a line for each; the number of those that fail or do not fit."""
    from mimo_train.preflight.dry_run import one_rank

    run = resolve(cfg)
    kinds, expected, failures = kinds_of(run.layout)[:most], estimates(run), 0
    print(f"{title}\n  {run.layout.world_size:,} ranks, {len(kinds_of(run.layout))} kinds", flush=True)
    one_rank.import_program()
    for kind in kinds:
        began, before = time.monotonic(), os.times()
        found = in_child(run, kind)
        seconds, after = time.monotonic() - began, os.times()
        computing = after.children_user + after.children_system - before.children_user - before.children_system
        print("  " + _line(kind, found, expected[kind.rank], seconds, computing), flush=True)
        failures += isinstance(found, RankFailure) or found.peak > DEVICE.memory
    return failures


def _line(kind: Kind, found: RankResult | RankFailure, estimate: int, seconds: float, computing: float) -> str:
    if isinstance(found, RankFailure):
        return f"rank {kind.rank}, {kind.name}: FAILS: {found.what}\n{found.trace}"
    done = "trained" + ", evaluated" * found.evaluated
    over = "" if found.peak <= DEVICE.memory else f", MORE than {DEVICE.name} has"
    return (
        f"rank {kind.rank}, {kind.name}: {done} in {seconds:.0f} s, {computing:.0f} s of processor time; process "
        f"{found.resident / GIB:.2f} GiB; peak "
        f"{found.peak / GIB:.2f} GiB{over}, {estimate / found.peak:.3f} of it estimated; {len(found.groups)} groups"
    )


def make_shards(folder: Path, cfg: ConfigContainer) -> None:
    """Samples of the largest media of every encoder, and a text that fills the row."""
    media, tokens, members = dict[str, tuple[str, bytes]](), 0, []
    for name, placeholder in placeholders_of(cfg).items():
        module = cfg.modules[name]
        encoder, merge = module.encoder, module.projector.merge
        if encoder.kind == "image":
            side = math.isqrt(getattr(encoder, "largest_area", 0) or encoder.image_size**2)
            media[placeholder] = "jpg", encode_image(side, side)
            tokens += encoder.num_tokens(side, side, merge=merge)
        else:
            media[placeholder] = "wav", _clip(encoder.max_samples, encoder.sample_rate)
            tokens += encoder.num_tokens(encoder.max_samples, encoder.sample_rate, merge=merge)
    text = chat("".join(media) + "?", "a" * (cfg.data.sequence_length - tokens - 64))
    for number in range(SAMPLES):
        members += [(f"{number:04d}.{end}", raw) for end, raw in media.values()] + [(f"{number:04d}.json", text)]
    write_tar(folder / "s-000000.tar", members)


def _clip(samples: int, rate: int) -> bytes:
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, np.zeros(samples, dtype=np.int16), rate, format="WAV", subtype="PCM_16")
    return file.getvalue()


if __name__ == "__main__":
    sys.exit(main())
