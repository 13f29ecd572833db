"""The simulation of a step against closed forms, and a bound that holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo_train.planner.schedule import Stage, ends, least_seconds


def line(stages: int, forward: float, backward: float, send: float = 0.0) -> list[Stage]:
    """Equal stages, one behind the other."""
    return [Stage(forward, backward, at + 1 if at < stages - 1 else None, send) for at in range(stages)]


@pytest.mark.parametrize(
    ("stages", "microbatches", "chunks"),
    [(1, 4, 1), (2, 4, 1), (4, 8, 1), (4, 2, 1), (8, 64, 1), (2, 2, 2), (4, 8, 2), (4, 16, 4)],
)
def test_equal_stages_take_what_the_bubble_says(stages, microbatches, chunks):
    """(m + (p - 1) / v) times forward and backward: Narayanan et al. 2021, section 2.2."""
    pipeline = line(stages, 1.0, 2.0)
    seconds = max(ends(pipeline, microbatches, chunks))
    assert seconds == pytest.approx(3 * microbatches + 3 * (stages - 1) / chunks)
    assert seconds == pytest.approx(least_seconds(pipeline, microbatches, chunks))


def test_two_stages_by_hand():
    """Forward 1 and 3, backward 1 and 3, messages of 1: the second stage is busy from 2 to 20, then the last gradient
    goes back."""
    pipeline = [Stage(1, 1, 1, 1), Stage(3, 3, None)]
    assert ends(pipeline, 3) == [22, 20]
    assert least_seconds(pipeline, 3) == 22


def test_two_givers_meet_at_their_taker():
    """Two encoders side by side: the slower one is waited for, the other costs nothing."""
    both = [Stage(2, 0, 2), Stage(1, 0, 2), Stage(1, 1, None)]
    alone = [Stage(2, 0, 1), Stage(1, 1, None)]
    assert ends(both, 3)[2] == ends(alone, 3)[1] == 8


def test_few_microbatches_leave_stages_waiting():
    assert max(ends(line(4, 1.0, 1.0), 1)) == 8


pipelines = st.lists(
    st.tuples(st.floats(0.01, 5), st.floats(0, 5), st.floats(0, 1)), min_size=1, max_size=5
).map(lambda each: [
    Stage(forward, backward, at + 1 if at < len(each) - 1 else None, send)
    for at, (forward, backward, send) in enumerate(each)
])  # fmt: skip


@given(pipeline=pipelines, microbatches=st.integers(1, 6), chunks=st.integers(1, 3))
def test_the_bound_is_one_and_no_stage_is_faster_than_its_work(pipeline, microbatches, chunks):
    chunks = chunks if len(pipeline) > 1 else 1
    microbatches *= len(pipeline) if chunks > 1 else 1  # interleaving takes groups of them
    done = ends(pipeline, microbatches, chunks)
    assert least_seconds(pipeline, microbatches, chunks) <= max(done) + 1e-9
    for stage, end in zip(pipeline, done, strict=True):
        assert end >= microbatches * (stage.forward + stage.backward) - 1e-9


@given(pipeline=pipelines, microbatches=st.integers(1, 6), factor=st.floats(0, 1))
def test_faster_messages_are_never_slower(pipeline, microbatches, factor):
    faster = [stage._replace(send=stage.send * factor) for stage in pipeline]
    assert max(ends(faster, microbatches)) <= max(ends(pipeline, microbatches)) + 1e-9
