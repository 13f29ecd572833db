"""Signals to the launcher and its last line; torch's context of the ranks is replaced."""

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.agent.server import RunResult, WorkerSpec, WorkerState

from mimo_train.launch import torchrun
from mimo_train.launch.nodes import Nodes
from mimo_train.launch.torchrun import Agent, NodeRendezvous, _report


@pytest.fixture
def sent(monkeypatch):
    """(process, signal) of all that is sent, where no timer is set."""
    sent = []
    monkeypatch.setattr(torchrun.os, "kill", lambda *call: sent.append(call))
    monkeypatch.setattr(torchrun.os, "killpg", lambda *call: sent.append(call))
    monkeypatch.setattr(torchrun.signal, "setitimer", lambda *_: None)
    return sent


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """An agent with one rank, process 11."""
    spec = WorkerSpec("default", 1, NodeRendezvous(Nodes()), entrypoint="true")
    agent = Agent(spec, tmp_path, grace_seconds=7.5)
    handlers = {0: SimpleNamespace(proc=SimpleNamespace(pid=11, poll=lambda: None))}
    monkeypatch.setattr(torchrun, "SubprocessContext", SimpleNamespace)
    monkeypatch.setattr(agent, "_pcontext", SimpleNamespace(subprocess_handlers=handlers, close=lambda *_: None))
    return agent


def test_two_interrupts_within_a_second_are_one_and_a_later_one_kills(agent, sent, monkeypatch):
    clock = SimpleNamespace(now=10.0)
    monkeypatch.setattr(torchrun.time, "monotonic", lambda: clock.now)
    for clock.now in (10.0, 10.01, 11.0):  # `timeout` forwards what the terminal has sent to the group
        agent.request_stop(signal.SIGINT, None)
    assert sent == [(11, signal.SIGTERM)]
    clock.now = 11.1
    agent.request_stop(signal.SIGINT, None)
    assert sent == [(11, signal.SIGTERM), (11, signal.SIGKILL)]


def said(agent, capsys, pid: int, exitcode: int) -> str:
    failure = SimpleNamespace(pid=pid, exitcode=exitcode, timestamp=1)
    assert _report(RunResult(WorkerState.FAILED, failures={0: failure}), agent, Path("a run")) == max(1, exitcode)
    return capsys.readouterr().err


def test_the_last_line_says_why_the_first_rank_ended(agent, sent, capsys):
    assert "rank 0 (process 11) failed with exit code 3; the messages above say why" in said(agent, capsys, 11, 3)
    aborted = said(agent, capsys, 11, -signal.SIGABRT)
    assert "was killed by SIGABRT (as gloo does" in aborted and "mimo-train hang 'a run' compares" in aborted
    assert "SIGKILL (out of memory, or killed by hand)" in said(agent, capsys, 11, -signal.SIGKILL)
    agent.request_stop(signal.SIGUSR1, None)
    assert "was stopped before training began" in said(agent, capsys, 11, -signal.SIGTERM)
    agent.end_of_grace(signal.SIGALRM, None)
    killed = said(agent, capsys, 11, -signal.SIGKILL)
    assert "was ended by this launcher: it did not finish within 7.5 s" in killed and "memory" not in killed
    assert sent == [(11, signal.SIGTERM), (11, signal.SIGKILL)]
