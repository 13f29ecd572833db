"""The data of a run: tokenizer, training and held-out files, and the resulting epochs and steps."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.media.options import colour_of
from data.order.sources import MixedOrder, Part
from data.text_format import plural
from mimo_train.config.errors import ConfigError, Fault
from mimo_train.config.keys import value_faults
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.pretrained.directory import read_directory
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_data import DataConfig
from mimo_train.config.schema_mix import source_names
from mimo_train.inputs.datasets import (
    build_dataset,
    has_another_tokenizer,
    held_out_sets,
    tokenizer_of,
    training_sources,
)
from mimo_train.inputs.mixture import Mixing, too_short
from mimo_train.layout.batch import Batch
from mimo_train.layout.ranks import lay_out
from mimo_train.layout.run import Run, steps_of_epochs
from mimo_train.preflight.check.held_out import add_demo_held_out, add_fewer, add_leakage, add_repeats
from mimo_train.preflight.check.report import Report, Table, fault_of, without_key
from mimo_train.preflight.check.shards import Seen, add_files

_WEIGHT_KEYS = re.compile(r"data\.mix\[\d+\]\.weight$|data\.mix_schedule")


def build_tokenizer(report: Report, cfg: ConfigContainer) -> Any | None:
    """Return the run's tokenizer; None, with a fault in the report, if it cannot be built."""
    if any(fault.key == "data.tokenizer" for fault in report.faults):
        return None
    try:
        return tokenizer_of(cfg)
    except DataError as error:
        key = str(error).partition(":")[0]
        keys = ("data.chat_template", "data.template_variables", "data.special_tokens_in_text")
        key = key if key in keys else "data.tokenizer"
        report.faults.append(Fault(key, without_key(error, key)))
        return None


def add_data(report: Report, cfg: ConfigContainer, tokenizer: Any | None) -> Seen:
    """Read training and held-out files. Without a tokenizer, files are opened and no sample is read."""
    rows = _tokenizer_rows(report, cfg, tokenizer)
    tokenizer = None if _is_wrong(cfg, "sequence_length") else tokenizer
    cfg = with_sound_values(cfg)
    if not cfg.data.shards and not cfg.data.mix:
        report.faults.append(
            Fault("data.shards", "is empty: give a folder, a glob, a brace range such as x-{000000..000127}.tar")
        )
    sets = held_out_sets(cfg)
    if all(one.is_test for one in sets):
        report.notes.append("data.validation_shards is empty: no evaluation")
    sources = [(one.key, one, Seen(name=one.name)) for one in training_sources(cfg)]
    others = [(one.key, one.source, Seen(name=one.name)) for one in sets if not one.fraction]
    names = Counter(part.name for *_, part in sources + others)
    for key, _, part in sources + others:
        if part.name and names[part.name] > 1:
            part.name = key.removesuffix(".shards")
    counts: dict[str, int] = {}
    for number, (key, source, part) in enumerate(sources + others):
        is_training, pattern = number < len(sources), str(source.shards)
        if not pattern:
            continue
        if cfg.data.demo and _is_absent(pattern):
            rows.append((key, pattern, f"not there: the {cfg.data.demo} demo is made on first use"))
            if is_training and importlib.util.find_spec("sklearn") is None:
                text = f"the {cfg.data.demo} demo needs scikit-learn: pip install 'mimo-train[demo]'"
                report.faults.append(Fault("data.demo", text))
            continue
        samples = add_files(report, cfg, key, source, tokenizer, part, rows)
        if is_training and samples:
            counts[key] = samples
        elif samples:
            add_fewer(report, cfg, key, samples)
    seen = Seen(of_sources=[part for *_, part in sources])
    seen.complete = all(part.complete for part in seen.of_sources)
    seen.fingerprint = seen.of_sources[0].fingerprint if len(sources) == 1 else None
    # The shares of the sources are not known yet, so take the largest of any source.
    media = _media_of_sources(seen)
    seen.media_per_sample = {name: max(values) for name, values in media.items()}
    if len(counts) == len(sources):
        _add_length(report, cfg, tokenizer, counts, seen, rows)
    add_repeats(report, cfg)
    add_demo_held_out(report, cfg)
    report.tables.append(Table("Data", (), rows))
    return seen


def with_sound_values(cfg: ConfigContainer) -> ConfigContainer:
    """Return `cfg` with defaults for invalid numbers and colours of `data`. Datasets reject these, and they must not
    hide faults of the shards."""
    numbers = {name: default for name, default in vars(DataConfig()).items() if type(default) in (int, float)}
    sound: dict[str, Any] = {name: default for name, default in numbers.items() if _is_wrong(cfg, name)}
    try:
        colour_of(cfg.data.background)
    except DataError:
        sound["background"] = DataConfig().background
    return replace(cfg, data=replace(cfg.data, **sound))


def _is_wrong(cfg: ConfigContainer, name: str) -> bool:
    return any(fault.key == f"data.{name}" for fault in value_faults(cfg.data, "data"))


def _is_absent(pattern: str) -> bool:
    path = Path(pattern)
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def _tokenizer_rows(report: Report, cfg: ConfigContainer, tokenizer: Any | None) -> list[tuple[str, ...]]:
    """Return rows of the data table; warn of template notes and of a tokenizer other than the model's."""
    if not tokenizer:
        return [("data.tokenizer", "at fault", "")]
    report.warnings += [f"data.chat_template: {note}" for note in tokenizer.template.notes]
    if folder := cfg.modules[LANGUAGE].pretrained:
        try:
            directory = read_directory(folder, f"modules.{LANGUAGE}.pretrained")
        except ConfigError:  # reported with its own key
            directory = None
        if directory is not None and has_another_tokenizer(directory, cfg, tokenizer):
            report.warnings.append(
                f"data.tokenizer: {cfg.data.tokenizer} is not the tokenizer of modules.{LANGUAGE}.pretrained={folder}: "
                "the rows of its vocabulary were trained for other tokens; leave data.tokenizer out to take the "
                "directory's"
            )
    return [
        ("data.tokenizer", cfg.data.tokenizer, f"{tokenizer.vocab_size:,} ids"),
        ("data.chat_template", cfg.data.chat_template, tokenizer.template.name),
    ]


def _media_of_sources(seen: Seen) -> dict[str, list[float]]:
    """Return the media items in a sample of each source, by module; empty if one source was not read."""
    if not all(part.media_per_sample for part in seen.of_sources):
        return {}
    modules = seen.of_sources[0].media_per_sample
    return {name: [part.media_per_sample[name] for part in seen.of_sources] for name in modules}


def _add_length(
    report: Report, cfg: ConfigContainer, tokenizer: Any, counts: dict[str, int], seen: Seen, rows: list
) -> None:
    """Add the length of the run in epochs of all sources and of each, if all files can be read."""
    data, sizes = cfg.data, list(counts.values())
    if any(fault.key == "data.mix" or _WEIGHT_KEYS.match(fault.key) for fault in report.faults):
        return  # there is no order with such weights
    if (data.mix or data.held_out_by or data.split) and tokenizer is not None:
        seen.fingerprint = None
        try:
            dataset = build_dataset(cfg, tokenizer)
            for one in held_out_sets(cfg):
                if one.fraction:
                    with closing(build_dataset(cfg, tokenizer, held_out=one)) as held_out:
                        add_fewer(report, cfg, one.key, len(held_out))
                        add_leakage(report, one, dataset, held_out)
        except DataError as error:
            report.faults.append(fault_of(error, next(iter(counts))))
            return
        sizes = dataset.source_sizes
        if seen.complete:
            seen.fingerprint = dataset.fingerprint
        if data.split or data.validation_fraction:
            left, share = sum(counts.values()) - sum(sizes), data.split or f"{data.validation_fraction:g}"
            rows.append((data.held_out_by or "data.split", share, f"{plural(left, 'sample')} not trained on"))
    seen.training_samples, seen.source_sizes = sum(sizes), sizes
    if any(fault.key.split(".")[0] in ("modules", "placement", "train") for fault in report.faults):
        return
    run, names = Run(cfg, lay_out(cfg), Batch.of(cfg)), source_names(data.mix)
    wanted = steps = steps_of_epochs(run, seen.training_samples) if cfg.train.epochs else cfg.train.iters
    if len(set(names)) < len(names):  # reported with its own key; weights are by name
        return
    mixing = Mixing(cfg, run.batch, sizes)
    order = MixedOrder([Part(0, size) for size in sizes], mixing.phases, cfg.run.seed)
    shares = [[weight / sum(weights) for weight in weights] for _, weights in mixing.phases]
    seen.media_per_sample = {
        name: max(sum(weight * value for weight, value in zip(share, values, strict=True)) for share in shares)
        for name, values in _media_of_sources(seen).items()
    }
    if data.exhausted == "stop" and (end := order.exhausted()) is not None:
        source, numbers = end
        steps = min(steps, run.batch.steps_within(numbers))
        if not steps:
            report.faults.append(too_short(cfg, run.batch, sizes[source], names[source] if names else ""))
            return
    seen.steps, drawn = steps, run.batch.samples_of(steps)
    epochs = f"{drawn / seen.training_samples:.2f} ({plural(drawn, 'sample')} drawn from {seen.training_samples:,})"
    rows.append(("epochs", "", epochs))
    _add_blocks(report, cfg, seen.training_samples, rows)
    if steps < wanted:
        key = "train.epochs" if cfg.train.epochs else "train.iters"
        rows.append(("data.exhausted", "stop", f"after {steps:,} of the {plural(wanted, 'step')} of {key}"))
    if data.mix:
        later = [f"from sample {start:,}" for start, _ in mixing.phases[1:]]
        table = [
            (name, f"{size:,}", *(f"{share[number]:.2%}" for share in shares), f"{count:,}", f"{count / size:.2f}")
            for number, (name, size, count) in enumerate(zip(names, sizes, order.counts(drawn), strict=True))
        ]
        report.tables.append(Table("Mixture", ("source", "samples", "share", *later, "drawn", "epochs"), table))


def _add_blocks(report: Report, cfg: ConfigContainer, samples: int, rows: list[tuple[str, str, str]]) -> None:
    """Report the blocks (`data.shuffle_block`) in an epoch of `samples` samples and in a step; warn of few."""
    block, step = cfg.data.shuffle_block, cfg.train.global_batch_size
    blocks = -(-samples // block)
    if block == 1:
        return
    rows.append(("data.shuffle_block", f"{block}", f"{blocks:,} blocks an epoch, about {step / block:.3g} a step"))
    if blocks < 2:
        report.warnings.append(
            f"data.shuffle_block: {block} is not less than the {samples:,} training samples: every epoch is in the "
            "order of the shards"
        )
    elif step < 4 * block:
        report.warnings.append(
            f"data.shuffle_block: a step of {plural(step, 'sample')} has less than 4 blocks of {block} neighbours: "
            "lower it, or raise train.global_batch_size, unless the shards' samples are shuffled well"
        )
