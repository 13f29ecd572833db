"""Runs a function on several ranks: processes forked from one that has imported Megatron-Core, joined over gloo."""

import contextlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.hang import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[2]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.dist.preload"])


class RankFailure(AssertionError):
    """A rank raised or died; the message holds the traceback of the first one that did."""


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """Call `function(*arguments)` on every rank and return the results in rank order.

    The first rank that fails takes the others down at once.

    Raises:
        RankFailure: a rank raised, died, or did not end within HANG_SECONDS.
    """
    processes, pipes, _meeting = _start(function, world_size, arguments)
    try:
        return _collect(pipes, time.monotonic() + HANG_SECONDS)
    finally:
        _end(processes, patience=5)


@contextmanager
def started_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> Iterator[list]:
    """The processes of ranks that call `function(*arguments)`, for a test that does something to them; what is left of
    them at the end is killed."""
    processes, _pipes, _meeting = _start(function, world_size, arguments)
    try:
        yield processes
    finally:
        _end(processes, patience=0)


def _start(function: Callable[..., Any], world_size: int, arguments: tuple) -> tuple[list, list, Any]:
    from torch.distributed import TCPStore

    with contextlib.chdir(ROOT):  # its preload imports this checkout, whichever is installed
        forkserver.ensure_running()
    # Held open by this process for all ranks: a port that is looked for first and opened later can be gone by then.
    meeting = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(world_size):
        receiver, sender = _context.Pipe(duplex=False)
        place = (sender, rank, world_size, meeting.port)
        process = _context.Process(target=_rank_main, args=(*place, function, arguments))
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    return processes, pipes, meeting


def _end(processes: list, patience: float) -> None:
    for process in processes:
        process.join(timeout=patience)
        if process.is_alive():
            process.kill()
            process.join()


def _collect(pipes: list, deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(0, deadline - time.monotonic()))
        if not ready:
            raise RankFailure(f"ranks {[rank for rank in range(len(pipes)) if rank not in results]} are still running")
        failures = []
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                good, results[rank] = pipe.recv()
            except EOFError:
                failures.append(f"rank {rank} died")
            else:
                failures += [] if good else [f"rank {rank}:\n{results[rank]}"]
        if failures:  # also that of the rank that others have lost
            raise RankFailure("\n".join(failures))
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(sender, rank: int, world_size: int, port: int, function, arguments) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
        # As under torchrun: the store is another process's, a rank only joins it.
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    if os.environ.get("MIMO_QUIET_RANKS"):
        sys.stdout = sys.stderr = open(os.devnull, "w")
    try:
        sender.send((True, function(*arguments)))
    except BaseException:
        sender.send((False, traceback.format_exc()))
    sender.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without waiting for peers that may be stuck in a collective: what a rank started is a thread, and ends with it.
    os._exit(0)
