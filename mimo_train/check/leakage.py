"""Held-out samples that were, in part, trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mimo_train.check.findings import Report
from mimo_train.config.schema import ConfigContainer
from mimo_train.plan.inputs import build_dataset, held_out_sets

if TYPE_CHECKING:
    from data.dataset import Dataset

LOOKED_AT = 1000
"""Held-out samples of each set."""


def add_leakage(report: Report, cfg: ConfigContainer, dataset: Dataset, tokenizer: Any) -> None:
    """Warns of held-out samples of `data.validation_fraction` with a picture or clip that is trained on, as of records
    that ask several things about one.

    Args:
        dataset: the training samples.

    Raises:
        DataError: shards cannot be read, or too few samples are held out.
    """
    from data.shared_media import shared_media

    for one in held_out_sets(cfg):
        if not one.fraction:
            continue
        held_out = build_dataset(cfg, tokenizer, held_out=one)
        try:
            found = shared_media(dataset, held_out, LOOKED_AT)
        finally:
            held_out.close()
        if found.samples:
            of = f" of {one.name}" if one.name else ""
            least = "" if found.is_whole else "at least "
            report.warnings.append(
                f"data.validation_fraction: {least}{found.samples:,} of {found.of:,} held-out samples{of} have a "
                "picture or clip that is trained on, in another sample: their loss does not tell what the model makes "
                "of new ones; hold them out by picture, with data.validation_shards"
            )
