"""Signals to the launcher while there are no ranks; torch's context of them is a stand-in."""

import signal
from types import SimpleNamespace

import pytest

from mimo_train.launch import torchrun
from mimo_train.launch.torchrun import Ranks


@pytest.fixture
def told(monkeypatch):
    """(process, signal) of all that is sent, where no timer is set."""
    sent = []
    monkeypatch.setattr(torchrun.os, "kill", lambda *one: sent.append(one))
    monkeypatch.setattr(torchrun.os, "killpg", lambda *one: sent.append(one))
    monkeypatch.setattr(torchrun.signal, "setitimer", lambda *_: None)
    return sent


def context(*pids: int) -> SimpleNamespace:
    """Ranks that live."""
    of = {n: SimpleNamespace(proc=SimpleNamespace(pid=pid, poll=lambda: None)) for n, pid in enumerate(pids)}
    return SimpleNamespace(subprocess_handlers=of)


def test_a_stop_before_a_restart_prevents_it(told, monkeypatch):
    ranks = Ranks(1.0)
    monkeypatch.setattr(torchrun.time, "sleep", lambda _: ranks.ask_to_stop(signal.SIGTERM, None))
    assert ranks.stopped_within(1000.0) and not told


def test_a_stop_while_nodes_meet_for_a_restart_ends_the_launcher(told):
    ranks = Ranks(1.0)
    ranks.started(context(11))
    assert not ranks.stopped_within(0.0)
    with pytest.raises(SystemExit) as ended:
        ranks.ask_to_stop(signal.SIGTERM, None)
    assert ended.value.code == 128 + signal.SIGTERM


def test_a_stop_while_ranks_start_again_reaches_them(told):
    ranks = Ranks(1.0)
    assert not ranks.stopped_within(0.0)
    ranks.starting = True
    ranks.ask_to_stop(signal.SIGTERM, None)
    ranks.started(context(12, 13))
    assert told == [(12, signal.SIGTERM), (13, signal.SIGTERM)]


def test_ranks_that_torchrun_starts_after_a_stop_are_told(told):
    ranks = Ranks(1.0)
    ranks.started(context(11))
    ranks.ask_to_stop(signal.SIGTERM, None)
    ranks.starting = True
    ranks.started(context(12))
    assert told == [(11, signal.SIGTERM), (12, signal.SIGTERM)]


def failure(pid: int, exitcode: int) -> SimpleNamespace:
    """As torch has it."""
    return SimpleNamespace(pid=pid, exitcode=exitcode, timestamp=1.0)


def test_two_interrupts_within_a_second_are_one(told, monkeypatch):
    clock = SimpleNamespace(now=10.0)
    monkeypatch.setattr(torchrun.time, "monotonic", lambda: clock.now)
    ranks = Ranks(1.0)
    ranks.started(context(11))
    for clock.now in (10.0, 10.01, 11.0):  # `timeout` forwards what the terminal has sent to the group
        ranks.ask_to_stop(signal.SIGINT, None)
    assert told == [(11, signal.SIGTERM)]
    clock.now = 11.1
    ranks.ask_to_stop(signal.SIGINT, None)
    assert told == [(11, signal.SIGTERM), (11, signal.SIGKILL)]


def test_a_rank_that_the_launcher_has_killed_is_not_said_to_lack_memory(told, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torchrun, "is_repeat", lambda _: False)
    grace, twice = Ranks(7.5), Ranks(1.0)
    for ranks in (grace, twice):
        ranks.started(context(11))
        ranks.ask_to_stop(signal.SIGINT, None)
    grace.end_of_grace(signal.SIGALRM, None)
    twice.ask_to_stop(signal.SIGINT, None)
    for ranks, why in (
        (grace, "it did not finish within 7.5 s after a stop was asked for"),
        (twice, "SIGINT came twice"),
    ):
        assert torchrun._report({0: failure(11, -signal.SIGKILL)}, ranks, tmp_path) == 1
        said = capsys.readouterr().err
        assert f"rank 0 (process 11) was ended by this launcher: {why}" in said and "memory" not in said
    torchrun._report({1: failure(12, -signal.SIGKILL)}, twice, tmp_path)  # before the launcher did
    assert "rank 1 (process 12) was killed by SIGKILL (out of memory, or killed by hand)" in capsys.readouterr().err
