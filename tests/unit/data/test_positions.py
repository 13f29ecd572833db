"""Positions in time, row and column of tokens of text, pictures and clips."""

import numpy as np

from data.text.placeholders import axis_positions

PICTURE, CLIP = 50, 51


def positions(ids, media) -> list[list[int]]:
    return axis_positions(np.array(ids), media).tolist()


def test_text_has_the_same_on_all_axes():
    assert positions([7, 8, 9], {}) == [[0, 1, 2]] * 3


def test_text_goes_on_behind_the_longer_side_of_a_picture():
    ids = [7, *[PICTURE] * 6, 8, 9]
    assert positions(ids, {PICTURE: [(6, (2, 3))]}) == [
        [0, 1, 1, 1, 1, 1, 1, 4, 5],
        [0, 1, 1, 1, 2, 2, 2, 4, 5],
        [0, 1, 2, 3, 1, 2, 3, 4, 5],
    ]


def test_pictures_at_both_ends_and_side_by_side():
    ids = [*[PICTURE] * 2, *[PICTURE] * 3, 7, PICTURE]
    assert positions(ids, {PICTURE: [(2, (2, 1)), (3, (1, 3)), (1, (1, 1))]}) == [
        [0, 0, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 5, 6],
        [0, 0, 2, 3, 4, 5, 6],
    ]


def test_what_forms_no_grid_counts_like_text():
    ids = [CLIP, CLIP, PICTURE, PICTURE, PICTURE, 7]
    media = {PICTURE: [(1, None), (2, (1, 2))], CLIP: [(2, None)]}
    assert positions(ids, media) == [[0, 1, 2, 3, 3, 5], [0, 1, 2, 3, 3, 5], [0, 1, 2, 3, 4, 5]]
