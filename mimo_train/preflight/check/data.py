"""The data of a run: tokenizer, training and held-out files, and the resulting epochs and steps."""

from __future__ import annotations

import importlib.util
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.errors import DataError
from data.order.sources import MixedOrder, Part
from data.storage.url import Place
from data.text_format import plural
from mimo_train.config.errors import ConfigError, Fault, UserError
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.pretrained.directory import read_directory
from mimo_train.config.pretrained.hub import named
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_mix import source_names
from mimo_train.evaluation.metrics import require_metrics
from mimo_train.inputs.datasets import (
    HeldOutSet,
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
from mimo_train.preflight.check.report import Report, Table, fault_of, without_key
from mimo_train.preflight.check.shards import Seen, add_files

if TYPE_CHECKING:
    from data.samples.protocol import Samples

COMPARED_SAMPLES = 1000
"""Held-out samples of each set to compare with the training samples."""


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
    """Read training and held-out files. Samples are read, which imports torch, if there is no fault so far."""
    rows = _tokenizer_rows(report, cfg, tokenizer)
    if report.faults and tokenizer is not None:
        report.notes.append("samples are read when the other faults are corrected")
    tokenizer = None if report.faults else tokenizer
    if not cfg.data.shards and not cfg.data.mix:
        report.faults.append(
            Fault("data.shards", "is empty: give a folder, a glob, a brace range such as x-{000000..000127}.tar")
        )
    sets = held_out_sets(cfg)
    for key, metrics in {held_out_set.metrics_key: held_out_set.metrics for held_out_set in sets}.items():
        try:
            require_metrics(metrics, key)
        except UserError as error:
            report.faults.append(Fault(key, without_key(error, key)))
    if all(held_out_set.is_test for held_out_set in sets):
        report.notes.append("data.validation_shards is empty: no evaluation")
    sources = [(source.key, source, Seen(name=source.name)) for source in training_sources(cfg)]
    others = [
        (held_out_set.key, held_out_set.source, Seen(name=held_out_set.name))
        for held_out_set in sets
        if not held_out_set.fraction
    ]
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
            if is_training and cfg.data.demo == "video_digits" and importlib.util.find_spec("av") is None:
                text = "the video_digits demo needs PyAV: pip install 'mimo-train[demo,video]'"
                report.faults.append(Fault("data.demo", text))
            continue
        samples = add_files(report, cfg, key, source, tokenizer, part, rows)
        if is_training and samples:
            counts[key] = samples
        elif samples:
            _add_fewer(report, next(item for item in sets if item.key == key), samples)
    seen = Seen(of_sources=[part for *_, part in sources])
    seen.complete = all(part.complete for part in seen.of_sources)
    seen.fingerprint = seen.of_sources[0].fingerprint if len(sources) == 1 else None
    # The shares of the sources are not known yet, so take the largest of any source.
    media = _media_of_sources(seen)
    seen.media_per_sample = {name: max(values) for name, values in media.items()}
    if not report.faults and len(counts) == len(sources):
        _add_length(report, cfg, tokenizer, counts, seen, rows)
    _add_repeats(report, cfg)
    _add_demo_held_out(report, cfg)
    report.tables.append(Table("Data", (), rows))
    return seen


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
        ("data.tokenizer", named(cfg.data.tokenizer), f"{tokenizer.vocab_size:,} ids"),
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
    """Add the length of the run in epochs of all sources and of each, for a run without faults."""
    data, sizes = cfg.data, list(counts.values())
    if data.mix or data.held_out_by or data.split:
        seen.fingerprint = None
        try:
            dataset = build_dataset(cfg, tokenizer)
            for held_out_set in held_out_sets(cfg):
                if held_out_set.fraction:
                    with closing(build_dataset(cfg, tokenizer, held_out=held_out_set)) as held_out:
                        _add_fewer(report, held_out_set, len(held_out))
                        add_leakage(report, held_out_set, dataset, held_out)
        except DataError as error:
            report.faults.append(fault_of(error, next(iter(counts))))
            return
        sizes = dataset.order.sizes
        if seen.complete:
            seen.fingerprint = dataset.fingerprint
        if data.split or data.validation_fraction:
            left, share = sum(counts.values()) - sum(sizes), data.split or f"{data.validation_fraction:g}"
            rows.append((data.held_out_by or "data.split", share, f"{plural(left, 'sample')} not trained on"))
    seen.training_samples, seen.source_sizes = sum(sizes), sizes
    run, names = Run(cfg, lay_out(cfg), Batch.of(cfg)), source_names(data.mix)
    wanted = steps = steps_of_epochs(run, seen.training_samples) if cfg.train.epochs else cfg.train.iters
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
    if data.shuffle_block > 1:
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


def _add_demo_held_out(report: Report, cfg: ConfigContainer) -> None:
    """Warn of a run on the user's data that is evaluated on a demo's shards."""
    if cfg.data.demo or not cfg.data.validation_shards:
        return
    from data.demo.make import MARKER

    held_out = Path(cfg.data.validation_shards)
    demo = next((folder for folder in (held_out, *held_out.parents[:2]) if (folder / MARKER).is_file()), None)
    trained_on = [Path(str(source.shards)).resolve() for source in training_sources(cfg)]
    if demo is None or any(path.is_relative_to(demo.resolve()) for path in trained_on):
        return
    report.warnings.append(
        f"data.validation_shards: {held_out} is of the demo in {demo}, and the run trains on other data: its "
        "evaluation says nothing about these; give held-out shards of your own, or data.validation_shards= and "
        "data.validation_fraction=0.01, which holds out some of data.shards (data.validation_shards= alone: no "
        "evaluation)"
    )


def add_leakage(report: Report, held_out_set: HeldOutSet, dataset: Samples, held_out: Samples) -> None:
    """Warn of held-out samples of `data.validation_fraction` whose media occur in other training samples, as with
    several questions about one image. Only samples of shards are compared.

    Args:
        dataset: the training samples.
        held_out: the samples of the set.

    Raises:
        DataError: shards cannot be read.
    """
    from data.samples.shard_dataset import ShardDataset
    from data.samples.verify import shared_media

    if not isinstance(dataset, ShardDataset) or not isinstance(held_out, ShardDataset):
        return
    shared = shared_media(dataset, held_out, COMPARED_SAMPLES)
    if shared.samples:
        of = f" of {held_out_set.name}" if held_out_set.name else ""
        least = "" if shared.is_whole else "at least "
        report.warnings.append(
            f"{held_out_set.key}: {least}{shared.samples:,} of {shared.of:,} held-out samples{of} have an image or "
            "clip that is trained on, in another sample: their loss does not tell what the model makes of new "
            "ones; hold them out by image, with data.validation_shards"
        )


def _add_repeats(report: Report, cfg: ConfigContainer) -> None:
    """Warn of shards that are named more than once, or both for training and for evaluation."""
    from data.indexed.find import find_any

    files: dict[str, Counter[Place]] = {}
    training = [source.shards for source in training_sources(cfg)]
    others = [(held_out.key, [held_out.source.shards]) for held_out in held_out_sets(cfg) if not held_out.fraction]
    for key, patterns in [("data.mix" if cfg.data.mix else "data.shards", training), *others]:
        try:
            files[key] = Counter(path.resolve() for shards in patterns for path in find_any(shards))
        except (DataError, OSError):
            continue  # no files, or reported with their key
        twice = [path for path, times in files[key].items() if times > 1]
        if twice:
            report.warnings.append(
                f"{key}: {plural(len(twice), 'shard')}, such as {twice[0]}, "
                "named more than once: an epoch has their samples as often"
            )
        trained = "data.mix" if cfg.data.mix else "data.shards"
        both = sorted(files[trained] & files[key], key=str) if trained in files and key != trained else []
        if both:
            report.warnings.append(
                f"{key}: {plural(len(both), 'shard')}, such as {both[0]}, also in {trained}: "
                "the evaluation sees what was trained on"
            )


def _add_fewer(report: Report, held_out_set: HeldOutSet, samples: int) -> None:
    """Warn if there are fewer held-out samples than an evaluation requests."""
    if held_out_set.samples > samples:
        limit = held_out_set.samples_key
        report.warnings.append(
            f"{held_out_set.key}: {limit} asks for {plural(held_out_set.samples, 'sample')}, and there are "
            f"{samples:,}: an evaluation takes these"
        )
