"""`mimo-train plan`: what it reads, asks for and writes. Imports no torch, unless it measures or reads
shards."""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data.text_format import plural
from mimo_train.config.compose import load, to_yaml
from mimo_train.config.errors import UserError
from mimo_train.config.schema import ConfigContainer
from mimo_train.estimate.parameters import embedding_rows
from mimo_train.inputs.inputs import tokenizer_of
from mimo_train.preflight.plan.alternatives import alternatives
from mimo_train.preflight.plan.counts import KnownStep, steps_at_hand
from mimo_train.preflight.plan.devices import DEVICES, Device
from mimo_train.preflight.plan.profile import read_profile
from mimo_train.preflight.plan.report import data_of, lines_of
from mimo_train.preflight.plan.search import NothingFits, Plan, Request, plan, require_sound


@dataclass(frozen=True)
class Options:
    """Of the command line; None where nothing was given."""

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
        UserError: a config with faults, options that do not fit, a file that cannot be written, no layout that fits.
    """
    cfg = load(config, overrides, without_data=options.without_data)
    require_sound(cfg)
    if options.write is not None and options.write.exists():
        raise UserError(f"--write: {options.write} is there already: remove it, or give another name")
    if options.write is not None:
        _require_folder(options.write, "--write")
    if options.measure:
        if options.profile is None:
            raise UserError("--measure needs --profile FILE, which it writes")
        _require_folder(options.profile, "--profile")
        from mimo_train.preflight.plan.measure import measure

        measure(cfg, _rows(cfg), options.node).write(options.profile)
    steps, missing = ((), "--without-data") if options.without_data else steps_at_hand(cfg)
    request = _request(cfg, options, steps, missing)
    try:
        found = plan(cfg, request)
    except NothingFits as error:
        raise UserError(f"{error}. {alternatives(cfg, request)}") from error
    if options.as_json:
        print(json.dumps(data_of(found, cfg, request), indent=1))
    else:
        print("\n".join(lines_of(found, cfg, request)))
    if options.write is not None:
        _write(options.write, found, cfg, config)
        print(_said_of_file(options.write, found), file=sys.stderr if options.as_json else sys.stdout)
    return 0


def device_of(options: Options) -> Device:
    """A device of the table, with what is given instead."""
    device = DEVICES[options.gpu]
    given = {
        "memory": (options.memory, 1e9),
        "half": (options.tflops, 1e12),
        "single": (options.tflops, 1e12),
        "inside": (options.bandwidth, 1e9),
        "across": (options.network, 1e9),
    }
    changes = {name: value * unit for name, (value, unit) in given.items() if value is not None}
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
    """Rows of the embedding. The tokenizer is looked at only where the config does not say how many."""
    tokens = cfg.llm.vocab_size or tokenizer_of(cfg).vocab_size
    return embedding_rows(cfg.llm, tokens)


def _require_folder(path: Path, option: str) -> None:
    """Before there is anything to write: the folder of a file is there, and can be written into."""
    if not path.parent.is_dir():
        raise UserError(f"{option}: {path.parent}, the folder of {path.name}, is not there: make it, or give another")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{option}: {path.parent}, the folder of {path.name}, cannot be written into: give another")


def _said_of_file(path: Path, found: Plan) -> str:
    """What was written, and what to do with it."""
    chosen = found.proposals[0].candidate
    ranks, given = chosen.world_size, chosen.gpus
    used = f"{ranks:,} of the {given:,} GPUs: the others would stand idle" if ranks < given else f"all {given:,} GPUs"
    return f"wrote {path}: proposal 1, on {used}; next: mimo-train check {shlex.quote(str(path))}"


def _write(path: Path, found: Plan, cfg: ConfigContainer, config: str) -> None:
    """The whole config with the first proposal."""
    chosen = found.proposals[0].candidate
    text = f"# {config} with the layout that `mimo-train plan` proposes for {plural(chosen.gpus, 'GPU')}.\n"
    try:
        path.write_text(text + to_yaml(chosen.config(cfg)))
    except OSError as error:
        raise UserError(f"--write: cannot write {path} ({error.strerror}): give another name") from error
