"""Positions on three axes, for language models whose rotary embeddings turn by time, row and column (M-RoPE; Wang et
al. 2024, arXiv 2409.12191, section 2.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Grid = tuple[int, int]
"""Rows and columns of the tokens that a picture takes in the sequence, which are in the order of its rows."""

Place = tuple[int, "Grid | None"]
"""Tokens of a picture or clip, and their grid; without one they are counted like text."""


def axis_positions(ids: np.ndarray, media: Mapping[int, Sequence[Place]]) -> np.ndarray:
    """Positions in time, row and column, int64 [3, S].

    A token of text has the same on all axes, one more than the largest before it. The tokens of a picture have that as
    their time, and add their row and column to it on the other axes. Padding is counted on like text.

    Args:
        ids: int64 [S].
        media: placeholder's id -> the pictures or clips whose tokens have it, in their order.
    """
    spans = []
    for placeholder, found in media.items():
        places, at = np.flatnonzero(ids == placeholder), 0
        assert len(places) == sum(tokens for tokens, _ in found), (placeholder, len(places), found)
        for tokens, grid in found:
            if grid is not None and tokens:
                spans.append((int(places[at]), grid))
            at += tokens
    positions = np.empty((3, len(ids)), dtype=np.int64)
    at = following = 0
    for first, (rows, columns) in sorted(spans):
        positions[:, at:first] = following + np.arange(first - at)
        following += first - at
        at = first + rows * columns
        positions[0, first:at] = following
        positions[1, first:at] = following + np.repeat(np.arange(rows), columns)
        positions[2, first:at] = following + np.tile(np.arange(columns), rows)
        following += max(rows, columns)
    positions[:, at:] = following + np.arange(len(ids) - at)
    return positions
