"""Reasons to end that one rank knows, the flag that reaches waiting ranks, and the collector that is off in a run."""

import gc
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mimo_train.launch import exit_signal
from mimo_train.launch.exit_signal import ExitSignal
from mimo_train.layout.run import config_faults
from mimo_train.training import shutdown, train_step
from mimo_train.training.callbacks import Callbacks, StepChecks
from mimo_train.training.shutdown import AgreedVotes, ExitVotes, StepsDiffer, StopFlag
from mimo_train.training.step.state import GlobalState, StepResult
from tests.hang import HANG_SECONDS
from tests.unit.configs import changed, load


@pytest.fixture
def interruptible():
    """A process that a terminal can interrupt and hang up on; tests may run in the background."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_a_vote_and_ends_nothing_by_itself(interruptible, number):
    before = signal.getsignal(number)
    with ExitSignal() as listening:
        votes = ExitVotes(listening, 0, time.time())
        assert votes.local() == (False, False)
        os.kill(os.getpid(), number)
        assert votes.local() == (True, False)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_ends_the_process_unless_a_wrapper_has_forwarded_it(interruptible, monkeypatch, capfd, first):
    clock = iter([10.0, 10.9, 11.1])
    monkeypatch.setattr(exit_signal, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with ExitSignal() as listening:
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), signal.SIGINT)
        assert listening.requested()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err.count("saves") == (first == signal.SIGINT)


def test_ignored_signals_of_a_terminal_stay_ignored(interruptible):
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with ExitSignal() as listening:
        for number in (signal.SIGINT, signal.SIGHUP):
            os.kill(os.getpid(), number)
        assert not listening.requested()


def test_a_handler_that_python_did_not_set_fails_no_run(interruptible, monkeypatch):
    set_now = []

    def of_c(number, handler):
        """As `signal.signal`, where a handler was installed before Python started: it is None, and cannot be set."""
        if handler is None:
            raise TypeError("signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable object")
        set_now.append(number)

    monkeypatch.setattr(signal, "signal", of_c)
    with ExitSignal():
        assert set_now == [*ExitSignal.SIGNALS]
    assert set_now == [*ExitSignal.SIGNALS]


def test_a_signal_is_told_from_another_thread_at_once():
    told, before = queue.SimpleQueue(), signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    others = signal.signal(signal.SIGUSR2, lambda *_: None)
    with ExitSignal() as listening:
        listening.tell_by(lambda: told.put(threading.current_thread()))
        os.kill(os.getpid(), signal.SIGUSR2)  # has a handler too, and asks for no end
        assert not listening.requested()
        os.kill(os.getpid(), signal.SIGTERM)
        assert told.get(timeout=HANG_SECONDS) is not threading.main_thread()
        assert told.empty() and listening.requested()
        again = threading.Event()
        listening.tell_by(again.set)  # of the next life in this process
        assert again.is_set()
    signal.signal(signal.SIGUSR2, others)
    assert signal.set_wakeup_fd(before) == before


class Store(dist.HashStore):
    """Of one process, in which two ranks are played."""

    def clone(self):
        return self


def test_a_wait_is_given_up_for_any_vote_of_this_rank_and_for_a_signal_to_another(monkeypatch):
    monkeypatch.setattr(shutdown, "_PAUSE", 0.0)
    late = ExitVotes(ExitSignal(), 1, time.time() - 61, ends_waits=True)
    assert late.gives_up() and late.local() == (False, True)
    assert not ExitVotes(ExitSignal(), 1, time.time() - 61).gives_up(), "where nobody asks for votes"
    assert ExitVotes(ExitSignal(), 0, time.time()).before_a_step is None

    store = Store()
    peer = ExitVotes(ExitSignal(), 0, time.time(), ends_waits=True)
    peer.meet(store)
    assert not peer.gives_up() and peer.local() == (False, False)
    with ExitSignal() as listening:
        signalled = ExitVotes(listening, 0, time.time(), ends_waits=True)
        assert not signalled.gives_up()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signalled.gives_up(), "before ranks have met"
        signalled.meet(store)
    assert peer.gives_up() and peer.local() == (True, False), "who has given up votes"
    assert peer.before_a_step() == (True, False)


@pytest.mark.parametrize(
    ("minutes", "started", "vote"), [(0, 1e9, False), (2, 1, False), (2, 130, True), (0.01, 0.7, True)]
)
def test_time_is_a_vote_after_its_minutes(minutes, started, vote):
    assert ExitVotes(ExitSignal(), minutes, time.time() - started).local() == (False, vote)


def test_a_clock_that_is_set_ends_no_run(monkeypatch):
    votes = ExitVotes(ExitSignal(), 2, time.time())
    state = GlobalState(SimpleNamespace(), start_time=time.time() - 5)
    monkeypatch.setattr(time, "time", lambda: 9e9)
    assert votes.local() == (False, False)
    assert 5 <= state.job_seconds < 100


@pytest.mark.parametrize(
    ("sums", "signalled", "late"), [([0.0, 0.0], False, False), ([1.0, 0.0], True, False), ([0.0, 3.0], False, True)]
)
def test_one_vote_on_any_rank_is_agreed_on(sums, signalled, late):
    votes = ExitVotes(ExitSignal(), 0, time.time())
    assert votes.agreed == AgreedVotes(), "no step was made"
    votes.receive([*sums, 3, 6, 12])  # three ranks at step 2
    assert votes.agreed == AgreedVotes(signalled, late)


@pytest.mark.parametrize("steps", [(7, 7), (1023,) * 3, (1024, 1024), (6, 7), (5, 6, 7), (1023, 1024)])
def test_ranks_that_sum_different_steps_end(steps):
    votes = ExitVotes(ExitSignal(), 0, time.time())
    sums = [sum(numbers) for numbers in zip(*map(votes.numbers, steps), strict=True)]
    assert len(sums) == ExitVotes.NUMBERS
    if len(set(steps)) == 1:
        votes.receive(sums)
        assert votes.agreed == AgreedVotes()
    else:
        with pytest.raises(StepsDiffer, match=f"^{len(steps)} ranks have summed different steps"):
            votes.receive(sums)


class Cycle:
    """Garbage that only a collector finds."""

    alive = 0

    def __init__(self):
        self.itself = self
        Cycle.alive += 1

    def __del__(self):
        Cycle.alive -= 1


@pytest.fixture
def no_cycles():
    gc.collect()
    Cycle.alive = 0
    yield
    gc.collect()
    gc.enable()


@pytest.mark.parametrize("was_on", [True, False])
@pytest.mark.parametrize("interval", [3, 0])
def test_garbage_is_collected_at_its_interval_and_python_gets_its_collector_back(no_cycles, was_on, interval):
    """Without an interval Python decides."""
    gc.enable() if was_on else gc.disable()
    cfg, remaining = load("gpt_tiny", f"train.manual_gc_interval={interval}"), []
    with pytest.raises(KeyError), ExitStack() as loop:
        events = Callbacks([StepChecks([], loop)])
        state = SimpleNamespace(cfg=cfg, train_state=SimpleNamespace(step=0))
        events.fire("on_train_start", state, [])
        assert gc.isenabled() is (was_on and not interval)
        for state.train_state.step in range(1, 7):
            Cycle()
            events.fire("on_step_end", state, StepResult())
            remaining.append(Cycle.alive)
        raise KeyError
    assert remaining == ([1, 2, 0, 1, 2, 0] if interval else [1, 2, 3, 4, 5, 6])
    assert gc.isenabled() is was_on
    assert not interval or gc.get_freeze_count() == 0


@pytest.mark.parametrize("entry", ["mine", "mine:", ":Mine", "my-package:Mine", "mine.Mine", "a..b:C"])
def test_a_callback_that_names_no_class_is_a_fault(entry):
    (fault,) = config_faults(changed({"train.callbacks": ["good.module:Good", entry]}))
    assert fault.key == "train.callbacks" and repr(entry) in fault.message
    (fault,) = config_faults(changed({"train.forward_step": entry}))
    assert fault.key == "train.forward_step" and repr(entry) in fault.message


def test_a_flag_reaches_the_others_and_is_of_one_life(monkeypatch):
    monkeypatch.setattr(shutdown, "_PAUSE", 0.0)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    one, other, later = (StopFlag(dist.PrefixStore(f"life_{life}", store)) for life in (0, 0, 1))
    assert not other.is_set()
    one.set()
    one.set()
    assert other.is_set() and one.is_set() and not later.is_set()


SERVER = """
import time, torch.distributed as dist
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("opened", [False, True], ids=["not opened yet", "opened"])
def test_a_store_that_does_not_answer_holds_nobody_up(monkeypatch, opened):
    monkeypatch.setattr(shutdown, "_PAUSE", 0.0)
    monkeypatch.setattr(shutdown, "_PATIENCE", 0.2)
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        store = dist.TCPStore("localhost", int(server.stdout.readline()), is_master=False, wait_for_workers=False)
        flag = StopFlag(store)
        if opened:
            monkeypatch.setattr(shutdown, "_PATIENCE", 20.0)
            flag.set()
            assert flag.is_set()
            monkeypatch.setattr(shutdown, "_PATIENCE", 0.2)
        os.kill(server.pid, signal.SIGSTOP)
        threads = list(Path(f"/proc/{server.pid}/task").iterdir())
        while not all((thread / "stat").read_text().rpartition(")")[2].split()[0] == "T" for thread in threads):
            time.sleep(0.01)  # a busy machine stops them late
        assert not flag.is_set()
        flag.set()
        assert not flag.is_set()
    finally:
        server.kill()
        server.wait()


def test_a_step_that_asks_to_exit_receives_the_votes_first(monkeypatch):
    """Or ranks at different steps would save together."""
    sums = {"tokens": torch.ones(1), "votes": torch.tensor([0.0, 0, 2, 3, 5]), "save": torch.zeros(2)}
    for name, result in (
        ("forward_backward", None),
        ("local_metrics", {}),
        ("reduce_metrics", sums | {"bad samples": torch.zeros(1)}),
        ("divide_gradients", None),
    ):
        monkeypatch.setattr(train_step, name, lambda *arguments, result=result: result)
    session = SimpleNamespace(
        data=SimpleNamespace(current=SimpleNamespace(microbatches=[1]), receive=lambda *arguments: None),
        parts=SimpleNamespace(pipeline=SimpleNamespace(device="cpu", chunks=[]), stopwatch=lambda name: nullcontext()),
        rerun=SimpleNamespace(runs=lambda data: [None], verdict=lambda: (True, True, 16)),
        votes=ExitVotes(ExitSignal(), 0, 0),
        checkpointer=SimpleNamespace(receive=lambda status: seen.append(status)),
        optimizer=None,
        losses=None,
    )
    seen: list = []
    with pytest.raises(StepsDiffer):
        train_step.train_step(session, None)
    sums["votes"][2:] = torch.tensor([2.0, 2, 2])
    result = train_step.train_step(session, None)
    assert (result.should_checkpoint, result.should_exit, result.exit_code, seen) == (True, True, 16, [[0.0, 0.0]])
