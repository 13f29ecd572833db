"""Run the flight recorder and the watchdog around everything that a rank does."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from mimo_train.config.errors import PeersError
from mimo_train.flight.file_format import CALLER, ERROR
from mimo_train.flight.recorder import RECORDER
from mimo_train.flight.watchdog import Watch, handed_down
from mimo_train.launch.exit_signal import grace_seconds
from mimo_train.layout.run import Run

LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "remote process exited")
"""Messages of gloo and NCCL when a peer has ended."""


@contextmanager
def watched(run: Run) -> Iterator[None]:
    """Record and watch the block. Nested blocks have no effect."""
    if RECORDER.in_use:
        yield
        return
    launcher = handed_down()
    pid = launcher[0] if launcher else os.getppid() if has_launcher() else 0
    RECORDER.open(run.dir, _rank(run), run.layout.world_size, pid)
    seconds = run.cfg.run.hang_report_seconds
    # An in-process restart handles a hang better than ending the run does.
    ends = run.cfg.run.inprocess_restarts == 0
    watch = Watch(RECORDER, run.dir, seconds, ends=ends, grace_seconds=grace_seconds(), launched=has_launcher())
    try:
        yield
        RECORDER.to("end")
    except BaseException as error:
        note_error(error)
        raise
    finally:
        watch.close()
        RECORDER.close()


@contextmanager
def working() -> Iterator[None]:
    """Record that a run which the user's program steps works in the block; it may pause between blocks."""
    RECORDER.to("loop")
    try:
        yield
    except BaseException as error:
        note_error(error)
        raise
    finally:
        RECORDER.to(CALLER)


def note_error(error: BaseException) -> None:
    """Record the error that ends this rank, unless another rank caused it."""
    if not isinstance(error, PeersError) and not is_lost_peer(error):
        first = next(iter(str(error).splitlines()), "")
        RECORDER.note(ERROR, f"{type(error).__name__}: {first}")


def is_lost_peer(error: BaseException) -> bool:
    """True if the error says that another rank has ended."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in LOST_PEER)


def has_launcher() -> bool:
    """True if torchrun started this process. A shell that ends must not end what was started from it."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _rank(run: Run) -> int:
    """Return this process's rank, also inside `numbered`, where RANK already skips idle processes."""
    rank = int(os.environ.get("RANK", "0"))
    renumbered = os.environ.get("WORLD_SIZE", "1") == str(run.layout.world_size)
    return rank if renumbered else run.layout.processes.index(rank)
