"""Positions of a sample's tokens on several axes, and its tokens that see later ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from data.errors import SeveralAnswers
from data.order.step import TextSample
from data.samples.media_spec import Media, is_video
from data.samples.sample_meta import SampleMeta
from data.text.placeholders import axis_positions, blocks_of


def by_class(spec: Media, extents: Sequence[tuple[int, ...]]) -> bool:
    """True if a module's `positions` are those of a sample with items of these extents."""
    return not spec.has_usual_grids or any(map(is_video, extents))


def positioned(
    sample: TextSample,
    meta: SampleMeta,
    placeholders: Mapping[str, int],
    modules: Sequence[Media],
    *,
    is_stand_in: bool = False,
) -> TextSample:
    """Return the sample with M-RoPE positions, and with the blocks of tokens that see each other.

    Args:
        placeholders: module -> id.

    Raises:
        SeveralAnswers: all tokens before an answer see each other, and it has several.
    """
    of_class = next((spec for spec in modules if spec.positions), None)
    extents = [] if of_class is None or is_stand_in else meta.extents(of_class)  # a stand-in has no text around images
    if of_class is not None and of_class.positions is not None and by_class(of_class, extents):
        sample = replace(sample, positions=of_class.positions(sample.input_ids, extents))
    elif any(spec.grid for spec in modules):
        places = {
            placeholders[spec.module]: [(tokens, None if is_stand_in else grid) for tokens, grid in meta.places(spec)]
            for spec in modules
        }
        sample = replace(sample, positions=axis_positions(sample.input_ids, places))
    kinds = {placeholders[spec.module]: spec.bidirectional for spec in modules if spec.bidirectional}
    if "prefix" in kinds.values():
        learned = np.flatnonzero(sample.loss_mask)
        if len(learned) and learned[-1] - learned[0] >= len(learned):
            raise SeveralAnswers(
                f"key {meta.key!r}: has several answers, and all tokens before an answer see each other"
            )
        end = learned[0] + 1 if len(learned) else sample.length  # labels are shifted
        return replace(sample, blocks=np.where(np.arange(len(sample.input_ids)) < end, 0, -1))
    types = [token for spec in modules if spec.bidirectional for token in spec.types]
    if not kinds and not types:
        return sample
    blocks = blocks_of(sample.input_ids, [*kinds, *types])
    return replace(sample, blocks=blocks) if (blocks >= 0).any() else sample
