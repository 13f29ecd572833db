"""Held-out samples that were, in part, trained on, or that have nothing to do with what is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mimo_train.config.schema import ConfigContainer
from mimo_train.inputs.inputs import HeldOutSet, training_sources
from mimo_train.preflight.check.findings import Report

if TYPE_CHECKING:
    from data.samples.protocol import Samples

LOOKED_AT = 1000
"""Held-out samples of each set."""


def add_demo_beside_own(report: Report, cfg: ConfigContainer) -> None:
    """Warns of a run on data of the user's own that is evaluated on a demo's, whose shards a config still names."""
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
    """Warns of held-out samples of `data.validation_fraction` with a picture or clip that is trained on, as of records
    that ask several things about one. Samples of other files than shards have none.

    Args:
        dataset: the training samples.
        held_out: those of the set `one`.

    Raises:
        DataError: shards cannot be read.
    """
    from data.samples.dataset import Dataset
    from data.samples.shared_media import shared_media

    if not isinstance(dataset, Dataset) or not isinstance(held_out, Dataset):
        return
    found = shared_media(dataset, held_out, LOOKED_AT)
    if found.samples:
        of = f" of {one.name}" if one.name else ""
        least = "" if found.is_whole else "at least "
        report.warnings.append(
            f"{one.key}: {least}{found.samples:,} of {found.of:,} held-out samples{of} have a picture or clip that is "
            "trained on, in another sample: their loss does not tell what the model makes of new ones; hold them out "
            "by picture, with data.validation_shards"
        )
