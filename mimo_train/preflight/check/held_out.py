"""Warnings about held-out samples: seen in training, of a demo, or too few."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from data.errors import DataError
from data.storage.url import Place
from data.text_format import plural
from mimo_train.config.schema import ConfigContainer
from mimo_train.inputs.datasets import (
    HeldOutSet,
    held_out_sets,
    training_sources,
)
from mimo_train.preflight.check.report import Report

if TYPE_CHECKING:
    from data.samples.protocol import Samples


COMPARED_SAMPLES = 1000
"""Held-out samples of each set to compare with the training samples."""


def add_demo_held_out(report: Report, cfg: ConfigContainer) -> None:
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


def add_leakage(report: Report, one: HeldOutSet, dataset: Samples, held_out: Samples) -> None:
    """Warn of held-out samples of `data.validation_fraction` whose media occur in other training samples, as with
    several questions about one image. Only samples of shards are compared.

    Args:
        dataset: the training samples.
        held_out: the samples of the set `one`.

    Raises:
        DataError: shards cannot be read.
    """
    from data.samples.shard_dataset import ShardDataset
    from data.samples.verify import shared_media

    if not isinstance(dataset, ShardDataset) or not isinstance(held_out, ShardDataset):
        return
    shared = shared_media(dataset, held_out, COMPARED_SAMPLES)
    if shared.samples:
        of = f" of {one.name}" if one.name else ""
        least = "" if shared.is_whole else "at least "
        report.warnings.append(
            f"{one.key}: {least}{shared.samples:,} of {shared.of:,} held-out samples{of} have an image or clip that "
            "is trained on, in another sample: their loss does not tell what the model makes of new ones; hold them "
            "out by image, with data.validation_shards"
        )


def add_repeats(report: Report, cfg: ConfigContainer) -> None:
    """Warn of shards that are named more than once, or both for training and for evaluation."""
    from data.indexed.find import find_any

    files: dict[str, Counter[Place]] = {}
    training = [one.shards for one in training_sources(cfg)]
    others = [(one.key, [one.source.shards]) for one in held_out_sets(cfg) if not one.fraction]
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


def add_fewer(report: Report, cfg: ConfigContainer, key: str, samples: int) -> None:
    """Warn if there are fewer held-out samples than an evaluation requests."""
    if cfg.train.eval_samples > samples:
        report.warnings.append(
            f"{key}: train.eval_samples asks for {plural(cfg.train.eval_samples, 'sample')}, and there are "
            f"{samples:,}: an evaluation takes these"
        )
