"""The simulation of a step against closed forms, and its lower bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo_train.estimate.schedule import Part, Stage, ends, ends_on_cores, least_seconds


def line(stages: int, forward: float, backward: float, send: float = 0.0) -> list[Stage]:
    """Return equal stages in a chain."""
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


def test_two_sources_meet_at_their_destination():
    """The slower of two parallel encoders decides; the other one costs nothing."""
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


def test_microbatches_that_differ_by_hand():
    """Forward 1, 2 and 3, backward as long: the second stage waits for each, the first one for the last gradient."""
    part = Part(1, 1, (1, 2, 3))
    pipeline = [Stage(2, 2, 1, 0, (part,)), Stage(2, 2, None, 0, (part,))]
    # First stage: 0-1, 1-3, then backward of 0 from 3 on, forward of 2 till 7 ...; second: 1-3, 3-7, 7-13.
    assert ends(pipeline, 3) == [16, 13]
    assert least_seconds(pipeline, 3) == 16


@given(
    st.lists(st.lists(st.floats(0.1, 3), min_size=5, max_size=5), min_size=1, max_size=4),
    st.floats(0, 1),
    st.floats(0.1, 4),
)
def test_the_bound_holds_where_microbatches_differ(shares, send, backward):
    last = len(shares) - 1
    pipeline = [
        Stage(sum(own) / 5, backward * sum(own) / 5, None if at == last else at + 1, send, (Part(1.0, backward, own),))
        for at, own in enumerate(shares)
    ]
    assert least_seconds(pipeline, 5) <= max(ends(pipeline, 5)) * (1 + 1e-9)


def test_equal_parts_are_as_none():
    plain = [Stage(3, 5, 1, 0.5), Stage(2, 4, None)]
    parts = [
        Stage(3, 5, 1, 0.5, (Part(1, 3, (1,) * 6), Part(2, 2, (1,) * 6))),
        Stage(2, 4, None, 0, (Part(2, 4, (1,) * 6),)),
    ]
    assert ends(parts, 6) == pytest.approx(ends(plain, 6))
    assert least_seconds(parts, 6) == pytest.approx(least_seconds(plain, 6))


@given(st.data())
def test_with_cores_for_all_it_is_the_same(data):
    seconds = st.floats(0, 3)
    number = data.draw(st.integers(1, 4))
    chunks = data.draw(st.sampled_from([1, 2])) if number > 1 else 1
    pipeline = [
        Stage(data.draw(seconds), data.draw(seconds), at + 1 if at < number - 1 else None, data.draw(seconds))
        for at in range(number)
    ]
    alone = ends(pipeline, 2 * number, chunks)
    assert ends_on_cores(pipeline, [2] * number, 2.0 * number, 2 * number, chunks) == pytest.approx(alone)
    shared = ends_on_cores(pipeline, [2] * number, 1.5, 2 * number, chunks)
    work = sum(2 * 2 * number * (stage.forward + stage.backward) for stage in pipeline)
    # At least as long as the cores need, at most as if one rank worked at a time.
    assert max(max(alone), work / 1.5) <= max(shared) * (1 + 1e-9)
    assert max(shared) <= (max(alone) * 2 * number / 1.5 + 1e-9) * (1 + 1e-9)


def test_two_stages_on_one_core_by_hand():
    """Forward and backward 1 each, two microbatches, one core: eight seconds of work, and no waiting."""
    assert max(ends_on_cores(line(2, 1.0, 1.0), [1, 1], 1.0, 2)) == pytest.approx(8)
    # With messages of 1 the core is idle during the first and the last message.
    assert max(ends_on_cores(line(2, 1.0, 1.0, send=1.0), [1, 1], 1.0, 1)) == pytest.approx(6)
