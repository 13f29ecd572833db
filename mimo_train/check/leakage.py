"""Held-out samples that were, in part, trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mimo_train.check.findings import Report
from mimo_train.plan.inputs import HeldOutSet

if TYPE_CHECKING:
    from data.samples import Samples

LOOKED_AT = 1000
"""Held-out samples of each set."""


def add_leakage(report: Report, one: HeldOutSet, dataset: Samples, held_out: Samples) -> None:
    """Warns of held-out samples of `data.validation_fraction` with a picture or clip that is trained on, as of records
    that ask several things about one. Samples of other files than shards have none.

    Args:
        dataset: the training samples.
        held_out: those of the set `one`.

    Raises:
        DataError: shards cannot be read.
    """
    from data.dataset import Dataset
    from data.shared_media import shared_media

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
