"""Which axis of a position turns which frequency."""

from mimo_train.models.rotary import axes_of_frequencies


def test_one_axis_behind_the_other():
    assert axes_of_frequencies([1, 3, 2], interleaved=False) == [0, 1, 1, 1, 2, 2]


def test_axes_that_take_turns():
    assert axes_of_frequencies([4, 2, 2], interleaved=True) == [0, 1, 2, 0, 1, 2, 0, 0]
    assert axes_of_frequencies([24, 20, 20], interleaved=True).count(1) == 20
