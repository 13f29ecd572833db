"""`mimo-train plan`: reads the config, searches layouts, prints and writes the proposals. Torch is only imported to
measure or to read shards."""

import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
from mimo_train.preflight.plan.costs import read_profile
from mimo_train.preflight.plan.counts import KnownStep, steps_at_hand
from mimo_train.preflight.plan.report import data_of, lines_of
from mimo_train.preflight.plan.search import NothingFits, Plan, Request, fullest_rank, plan, require_sound


@dataclass(frozen=True)
class Options:
    """Options of the command line; None if not given."""

    gpus: int
    gpu: str
    node: int
    top: int
    margin: float
    media: float
    memory: float | None = None
    """GB."""
    tflops: float | None = None
    bandwidth: float | None = None
    """GB/s."""
    network: float | None = None
    """GB/s."""
    profile: Path | None = None
    measure: bool = False
    write: Path | None = None
    without_data: bool = False
    as_json: bool = False


def main(config: str, overrides: Sequence[str], options: Options) -> int:
    """Plan, print and write; returns 0.

    Raises:
        UserError: the config has faults, options do not fit, a file cannot be written, or no layout fits.
    """
    cfg = load(config, overrides, without_data=options.without_data)
    require_sound(cfg)
    if options.write is not None and options.write.exists():
        raise UserError(f"--write: {options.write} exists. Remove it or choose another name")
    if options.write is not None:
        _require_folder(options.write, "--write")
    if options.measure:
        if options.profile is None:
            raise UserError("--measure requires --profile FILE, which it writes")
        _require_folder(options.profile, "--profile")
        from mimo_train.preflight.plan.measure import measure

        measure(cfg, _rows(cfg), options.node).write(options.profile)
    steps, missing = ((), "--without-data") if options.without_data else steps_at_hand(cfg)
    request = _request(cfg, options, steps, missing)
    try:
        layouts = plan(cfg, request)
    except NothingFits as error:
        raise UserError(f"{error}. {alternatives(cfg, request)}") from error
    if options.as_json:
        print(json.dumps(data_of(layouts, cfg, request), indent=1))
    else:
        print("\n".join(lines_of(layouts, cfg, request)))
    if options.write is not None:
        _write(options.write, layouts, cfg, config)
        print(_written_text(options.write, layouts), file=sys.stderr if options.as_json else sys.stdout)
    return 0


def device_of(options: Options) -> Device:
    """Return a device of the table, changed by options."""
    device = DEVICES[options.gpu]
    values = {
        "memory": (options.memory, 1e9),
        "half": (options.tflops, 1e12),
        "single": (options.tflops, 1e12),
        "inside": (options.bandwidth, 1e9),
        "across": (options.network, 1e9),
    }
    changes = {name: value * unit for name, (value, unit) in values.items() if value is not None}
    return replace(device, **changes, name=f"{device.name}, changed" if changes else device.name)


def _request(cfg: ConfigContainer, options: Options, steps: tuple[KnownStep, ...], missing: str) -> Request:
    profile = None
    if options.profile is not None:
        profile = read_profile(options.profile, [*cfg.modules], cfg.train.precision)
    return Request(
        gpus=options.gpus,
        node=options.node,
        device=device_of(options),
        vocab=_rows(cfg),
        media=dict.fromkeys(cfg.encoders, options.media),
        margin=options.margin,
        top=options.top,
        profile=profile,
        steps=steps,
        even_since=missing,
    )


def _rows(cfg: ConfigContainer) -> int:
    """Return the rows of the embedding. The tokenizer is read only if the config does not set them."""
    tokens = cfg.llm.vocab_size or tokenizer_of(cfg).vocab_size
    return embedding_rows(cfg.llm, tokens)


def _require_folder(path: Path, option: str) -> None:
    if not path.parent.is_dir():
        raise UserError(
            f"{option}: the folder {path.parent} of {path.name} does not exist. Create it or choose another"
        )
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{option}: the folder {path.parent} of {path.name} is not writable. Choose another")


def _written_text(path: Path, layouts: Plan) -> str:
    chosen = layouts.proposals[0].candidate
    ranks, gpus = chosen.world_size, chosen.gpus
    used = f"{ranks:,} of the {gpus:,} GPUs: the others would stand idle" if ranks < gpus else f"all {gpus:,} GPUs"
    return f"wrote {path}: proposal 1, on {used}; next: mimo-train check {shlex.quote(str(path))}"


def _write(path: Path, layouts: Plan, cfg: ConfigContainer, config: str) -> None:
    chosen = layouts.proposals[0].candidate
    text = f"# {config} with the layout that `mimo-train plan` proposes for {plural(chosen.gpus, 'GPU')}.\n"
    try:
        path.write_text(text + to_yaml(chosen.config(cfg)))
    except OSError as error:
        raise UserError(f"--write: cannot write {path} ({error.strerror}): give another name") from error


RANK = 16
"""Rank of the adapters to try if nothing fits."""
DOUBLINGS = 6
"""Number of times to double the GPUs if nothing fits."""


def alternatives(cfg: ConfigContainer, request: Request) -> str:
    """Return sentences about alternatives that fit: the run with adapters, or on more GPUs."""
    return " ".join(_sentences(cfg, request)) or "Use more or larger GPUs."


def _sentences(cfg: ConfigContainer, request: Request) -> Iterator[str]:
    adapted = _with_adapters(cfg)
    if adapted is not None and (memory := fullest_rank(adapted, request)):
        key = f"modules.{LANGUAGE}.lora.rank={RANK}"
        yield f"With LoRA on the language model ({key}) it fits, with {memory / GIB:.3g} GiB a rank."
    for doubling in range(1, DOUBLINGS + 1):
        gpus = request.gpus * 2**doubling
        if memory := fullest_rank(cfg, replace(request, gpus=gpus)):
            yield f"On {gpus} x {request.device.name} it fits as it is, with {memory / GIB:.3g} GiB a rank."
            return


def _with_adapters(cfg: ConfigContainer) -> ConfigContainer | None:
    language = cfg.language
    if language.lora.rank:
        return None
    adapted = replace(language, lora=replace(language.lora, rank=RANK), freeze=[], freeze_until={})
    changed = replace(cfg, modules={**cfg.modules, LANGUAGE: adapted})
    try:
        require_sound(changed)
    except ConfigError:
        return None
    return changed
