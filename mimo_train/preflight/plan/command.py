"""`mimo-train plan`: reads the config, searches layouts, prints and writes the proposals. Torch is only imported to
read shards."""

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from data.text_format import plural
from mimo_train.config.compose import load, to_yaml
from mimo_train.config.errors import ConfigError, UserError
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.estimate.devices import DEVICES, Device
from mimo_train.estimate.memory import GIB
from mimo_train.estimate.parameters import embedding_rows
from mimo_train.inputs.datasets import tokenizer_of
from mimo_train.preflight.plan.data_shares import data_shares
from mimo_train.preflight.plan.predict import DataShares
from mimo_train.preflight.plan.report import data_of, lines_of
from mimo_train.preflight.plan.search import NothingFits, Plan, Request, fullest_rank, plan, require_sound


def main(args: argparse.Namespace) -> int:
    """Plan, print and write as the arguments of the command say; returns 0.

    Raises:
        UserError: the config has faults, options do not fit, a file cannot be written, or no layout fits.
    """
    cfg = load(args.config, args.overrides, without_data=args.without_data, weights=False)
    require_sound(cfg)
    if args.write is not None and args.write.exists():
        raise UserError(f"--write: {args.write} exists. Remove it or choose another name")
    if args.write is not None and not args.write.parent.is_dir():
        folder = f"the folder {args.write.parent} of {args.write.name}"
        raise UserError(f"--write: {folder} does not exist. Create it or choose another")
    vocab = embedding_rows(cfg.llm, cfg.llm.vocab_size or tokenizer_of(cfg).vocab_size)
    media = dict.fromkeys(cfg.encoders, args.media)
    shares = DataShares(missing="--without-data") if args.without_data else data_shares(cfg, vocab, media)
    device = device_of(args.gpu, args.memory, args.tflops, args.bandwidth, args.network)
    request = Request(args.gpus, args.gpus_per_node, device, vocab, media, args.margin, args.top, shares)
    try:
        layouts = plan(cfg, request)
    except NothingFits as error:
        raise UserError(f"{error}. {' '.join(_alternatives(cfg, request)) or 'Use more or larger GPUs.'}") from error
    if args.json:
        print(json.dumps(data_of(layouts, cfg, request), indent=1))
    else:
        print("\n".join(lines_of(layouts, cfg, request)))
    if args.write is not None:
        print(_write(args.write, layouts, cfg, args.config), file=sys.stderr if args.json else sys.stdout)
    return 0


def device_of(
    gpu: str,
    memory: float | None = None,
    tflops: float | None = None,
    bandwidth: float | None = None,
    network: float | None = None,
) -> Device:
    """Return a device of the table, with other GB, TFLOP/s and GB/s (two) if given."""
    values = {"memory": (memory, 1e9), "half": (tflops, 1e12), "single": (tflops, 1e12)}
    values |= {"inside": (bandwidth, 1e9), "across": (network, 1e9)}
    changes = {name: value * unit for name, (value, unit) in values.items() if value is not None}
    device = DEVICES[gpu]
    return replace(device, **changes, name=f"{device.name}, changed" if changes else device.name)


def _write(path: Path, layouts: Plan, cfg: ConfigContainer, config: str) -> str:
    """Write the config with the first proposal; returns what to do next."""
    chosen = layouts.proposals[0].candidate
    ranks, gpus = chosen.world_size, chosen.gpus
    text = f"# {config} with the layout that `mimo-train plan` proposes for {plural(gpus, 'GPU')}.\n"
    try:
        path.write_text(text + to_yaml(chosen.config(cfg)))
    except OSError as error:
        raise UserError(f"--write: cannot write {path} ({error.strerror}): give another name") from error
    used = f"{ranks:,} of the {gpus:,} GPUs: the others would stand idle" if ranks < gpus else f"all {gpus:,} GPUs"
    return f"wrote {path}: proposal 1, on {used}; next: mimo-train check {shlex.quote(str(path))}"


RANK = 16
"""Rank of the adapters to try if nothing fits."""
DOUBLINGS = 6
"""Number of times to double the GPUs if nothing fits."""


def _alternatives(cfg: ConfigContainer, request: Request) -> Iterator[str]:
    """Yield sentences about alternatives that fit: the run with adapters, or on more GPUs."""
    language = cfg.language
    adapted = replace(language, lora=replace(language.lora, rank=RANK), freeze=[], freeze_until={})
    with suppress(ConfigError):
        changed = replace(cfg, modules={**cfg.modules, LANGUAGE: adapted})
        require_sound(changed)
        if not language.lora.rank and (memory := fullest_rank(changed, request)):
            key = f"modules.{LANGUAGE}.lora.rank={RANK}"
            yield f"With LoRA on the language model ({key}) it fits, with {memory / GIB:.3g} GiB a rank."
    for doubling in range(1, DOUBLINGS + 1):
        gpus = request.gpus * 2**doubling
        if memory := fullest_rank(cfg, replace(request, gpus=gpus)):
            yield f"On {gpus} x {request.device.name} it fits as it is, with {memory / GIB:.3g} GiB a rank."
            return
