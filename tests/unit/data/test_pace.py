"""Samples that are read quickly are read in turn with the caller, others ahead of it."""

import pytest

from data.pace import Pace
from data.pipeline import Reader, StepLoader, WaitGivenUp
from tests.unit.data.test_loader import BATCHING, BOTH, same_steps, steps

READS = 16
"""Of a step of `BATCHING`: eight texts, and the media of eight samples."""


class Clock:
    """Seconds that pass whenever somebody looks at it."""

    def __init__(self, *seconds: float):
        """Of each step; the last for all that follow."""
        self.seconds, self._now, self._looks = [*seconds], 0.0, 0

    def perf_counter(self) -> float:
        self._looks += 1
        if self._looks % 2 == 0:  # the end of a step
            self._now += self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0]
        return self._now


def _read_at_each_step(data, monkeypatch, clock: Clock, **options) -> list[int]:
    """Texts that have been asked for when each of six steps is handed out."""
    asked, read = [], data.read_text
    monkeypatch.setattr(data, "read_text", lambda number: (asked.append(number), read(number))[1])
    monkeypatch.setattr("data.loader.time", clock)
    with StepLoader(data, BATCHING, BOTH, limit=6, takes_turns=True, **options) as loader:
        counts = []
        for _ in loader:
            if not loader._pace.in_turn:
                for step in loader._pending:  # what is read ahead is there
                    _ = [results() for results in step.texts]
            counts.append(len(asked))
        return counts


def test_what_is_quick_is_read_for_its_step_alone(dataset, monkeypatch):
    assert _read_at_each_step(dataset(), monkeypatch, Clock(0.001)) == [8, 16, 24, 32, 40, 48]


def test_what_is_slow_is_read_ahead(dataset, monkeypatch):
    found = _read_at_each_step(dataset(), monkeypatch, Clock(1.0))
    assert found == [8, 16, 24, 48, 48, 48], "after three steps two are read ahead"


def test_a_slow_start_is_forgiven(dataset, monkeypatch):
    found = _read_at_each_step(dataset(), monkeypatch, Clock(1.0, 1.0, 0.001, 1.0, 1.0, 0.001))
    assert found == [8, 16, 24, 32, 40, 48]


@pytest.mark.parametrize(("seconds", "in_turn"), [(0.0005 * (READS + 1), True), (0.0006 * (READS + 1), False)])
def test_half_a_millisecond_a_read_is_quick(seconds, in_turn):
    pace = Pace(takes_turns=True)
    for _ in range(3):
        pace.took(seconds, READS)
    assert pace.in_turn == in_turn


def test_a_machine_that_was_busy_for_a_while_is_tried_again_ever_more_seldom():
    pace, ahead = Pace(takes_turns=True), []
    for _ in range(2):
        while pace.in_turn:
            pace.took(1.0, READS)
        ahead.append(0)
        while not pace.in_turn:
            pace.was_ahead()
            ahead[-1] += 1
    assert ahead == [64, 128]
    pace.took(0.001, READS)
    pace.took(1.0, READS)
    assert pace.in_turn, "it is quick again, and one slow step is forgiven"
    never = Pace(takes_turns=False)
    for _ in range(200):
        never.was_ahead()
        assert not never.in_turn


def test_what_was_read_ahead_says_nothing_of_a_turn(dataset, monkeypatch):
    monkeypatch.setattr("data.pace._LOOKS_AGAIN", 1)
    monkeypatch.setattr("data.loader.time", Clock(1.0))
    with StepLoader(dataset(), BATCHING, BOTH, limit=9, takes_turns=True) as loader:
        turns = [loader._pace.in_turn for _ in loader]
    # After three in turn one is ahead, and two more that were read by then; after one in turn two are ahead.
    assert turns == [True, True, False, True, True, True, False, False, True]


def test_what_is_slow_stays_so_for_the_next_loader(dataset, monkeypatch):
    """As of the next evaluation, which begins ahead."""
    data = dataset()
    assert _read_at_each_step(data, monkeypatch, Clock(1.0))[3] == 48
    assert _read_at_each_step(data, monkeypatch, Clock(1.0))[0] == 24


def test_what_is_looked_up_is_no_read(dataset, monkeypatch):
    """Eight texts of a step may take 4.5 ms, and with the sizes of as many pictures no longer."""
    readers = [Reader("language", 0, 1), Reader("images", 0, 1, sizes_only=True)]
    for seconds, in_turn in ((0.0044, True), (0.0046, False)):
        monkeypatch.setattr("data.loader.time", Clock(seconds))
        with StepLoader(dataset(), BATCHING, readers, limit=3, takes_turns=True) as loader:
            assert len([*loader]) == 3 and loader._pace.in_turn == in_turn


def test_turns_change_no_sample(dataset):
    first = steps(dataset())
    for workers in (0, 1, 3):
        same_steps(first, steps(dataset(), workers=workers, takes_turns=True))


def test_pace_that_changes_changes_no_sample(dataset, monkeypatch):
    first = steps(dataset(), limit=9)
    monkeypatch.setattr("data.loader.time", Clock(0.001, 1.0))
    same_steps(first, steps(dataset(), limit=9, workers=2, takes_turns=True))


def test_errors_of_a_turn_are_those_of_the_caller(dataset, monkeypatch):
    data = dataset()
    monkeypatch.setattr(data.tokenizer, "encode", lambda text: 1 / 0)
    with pytest.raises(ZeroDivisionError), StepLoader(data, BATCHING, BOTH, takes_turns=True) as loader:
        next(loader)


def test_a_turn_is_given_up(dataset, monkeypatch):
    data, given_up = dataset(), []
    read = data.read_text

    def stand_still(number):
        while not given_up:
            pass
        return read(number)

    monkeypatch.setattr(data, "read_text", stand_still)
    monkeypatch.setattr("data.threads.LOOK_SECONDS", 0.01)
    with (
        pytest.raises(WaitGivenUp),
        StepLoader(
            data, BATCHING, [Reader("language", 0, 1)], takes_turns=True, gives_up=lambda: given_up.append(1) or True
        ) as loader,
    ):
        next(loader)


def test_what_is_not_at_hand_is_always_read_ahead(dataset):
    assert StepLoader(dataset(), BATCHING, BOTH, takes_turns=True)._pace.in_turn
    data = dataset()
    data.is_remote = True
    assert not StepLoader(data, BATCHING, BOTH, takes_turns=True)._pace.in_turn
    assert not StepLoader(dataset(), BATCHING, BOTH, workers=0, takes_turns=True)._pace.in_turn
    assert not StepLoader(dataset(), BATCHING, BOTH)._pace.in_turn
