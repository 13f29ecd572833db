"""The flight recorder and the watchdog of a rank, around all that it does."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

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
    """Record and watch the block; inside another such block it has no effect."""
    if RECORDER.in_use:
        yield
        return
    launcher = handed_down()
    pid = launcher[0] if launcher else os.getppid() if has_launcher() else 0
    RECORDER.open(run.dir, _rank(run), run.layout.world_size, pid)
    seconds = run.cfg.run.hang_report_seconds
    # A restart inside the processes is a better end of a hang than that of the run.
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


class Driven:
    """The recorder and the watchdog of a run whose steps the user's program makes. Between `calls` it may rest for any
    time."""

    def __init__(self) -> None:
        self._ends = ExitStack()

    @contextmanager
    def starts(self, run: Run) -> Iterator[None]:
        """Set the run up in the block; it is `watched` from then on to `close`, or to an error in the block."""
        with ExitStack() as ends:
            ends.enter_context(watched(run))
            yield
            RECORDER.to(CALLER)
            self._ends = ends.pop_all()

    @staticmethod
    @contextmanager
    def calls() -> Iterator[None]:
        """Let the run work in the block; an error that leaves it is noted."""
        RECORDER.to("loop")
        try:
            yield
        except BaseException as error:
            note_error(error)
            raise
        finally:
            RECORDER.to(CALLER)

    def close(self) -> None:
        """End the recording."""
        self._ends.close()


def note_error(error: BaseException) -> None:
    """Write the error that ends this rank into its file, unless it follows from another rank's."""
    if not isinstance(error, PeersError) and not is_lost_peer(error):
        first = next(iter(str(error).splitlines()), "")
        RECORDER.note(ERROR, f"{type(error).__name__}: {first}")


def is_lost_peer(error: BaseException) -> bool:
    """True if a rank fails because another one has ended."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in LOST_PEER)


def has_launcher() -> bool:
    """True if torchrun has started this process. A shell that ends must not end what was started from it."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _rank(run: Run) -> int:
    """Also inside of `numbered`, which counts without idle processes already."""
    rank = int(os.environ.get("RANK", "0"))
    renumbered = os.environ.get("WORLD_SIZE", "1") == str(run.layout.world_size)
    return rank if renumbered else run.layout.processes.index(rank)
