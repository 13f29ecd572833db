"""Joining neighbouring patches into one token (pixel shuffle), so that a picture takes fewer tokens."""

import torch


def merge_patches(features_NPH: torch.Tensor, rows: int, columns: int, merge: int) -> torch.Tensor:
    """Join each `merge` x `merge` square of patches.

    Args:
        features_NPH: features of `rows` x `columns` patches, row by row, [N, rows * columns, H].
        merge: side of the square; must divide rows and columns.

    Returns:
        [N, rows * columns / merge^2, H * merge^2]; the square's features are concatenated row by row.
    """
    if merge == 1:
        return features_NPH
    pictures, _, hidden = features_NPH.shape
    squares = features_NPH.reshape(pictures, rows // merge, merge, columns // merge, merge, hidden)
    return squares.permute(0, 1, 3, 2, 4, 5).reshape(pictures, -1, merge * merge * hidden)
