"""Processes of this machine: what the kernel says of them by /proc, where nothing is known elsewhere, and their end.
Imports no torch."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process that exists."""

    state: str
    """The kernel's letter: R, S, D, T (stopped), Z (ended, not yet noticed by its parent), ..."""
    start: int
    """Start time in clock ticks since boot; with the number it is the only process of its kind."""
    ticks: int
    """Processor time so far, in clock ticks."""


def process(pid: int) -> Process | None:
    """The process with this number; None if there is none, or the system has no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return Process(fields[0], int(fields[19]), int(fields[11]) + int(fields[12]))
    except (OSError, ValueError, IndexError):
        return None


def runs(pid: int, start: int) -> bool:
    """Whether the process with this number and start time has not ended."""
    found = process(pid)
    return found is not None and found.start == start and found.state not in "ZX"


def descendants(pid: int) -> Iterator[int]:
    """Processes that `pid` has started, and theirs."""
    try:
        tasks = [*Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return
    for task in tasks:
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue
        for child in map(int, children):
            yield child
            yield from descendants(child)


def kill_session(pid: int) -> None:
    """End a process and, where it leads a group of its own, what it has started."""
    kill: Callable[[int, int], None] = os.killpg if os.getpgid(pid) == pid else os.kill
    kill(pid, signal.SIGKILL)


def storage_bytes(pid: int) -> int:
    """Bytes that a process has read from and written to storage; 0 where that is not told."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    numbers = dict(line.split(": ") for line in lines)
    return int(numbers.get("read_bytes", 0)) + int(numbers.get("write_bytes", 0))
