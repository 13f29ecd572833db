"""Read the recorder files of a live or dead run, and the state of its processes from /proc."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mimo_train.config.errors import UserError
from mimo_train.config.paths import runs_within
from mimo_train.flight.file_format import ENTER, ERROR, FOLDER, MAGIC, PHASES, READING, SIZE, WAIT, Event, Last, Record

CLOCKS = 10.0
"""Largest difference in seconds between the clocks of machines."""


class Group(NamedTuple):
    """A process group; its name is the same on all of its ranks."""

    name: str
    description: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks)) if len(self.ranks) <= 8 else f"{len(self.ranks)} ranks"
        return f"{self.description or f'group {self.name}'} [{ranks}]"


class Rank(Record):
    """One reading of a rank's file. Times are in the rank's monotonic clock.

    Attributes:
        groups: its process groups by number.
        places: names of edges and modules by number.
        last: last messages by group name, peer (-1: collectives) and direction.
    """

    groups: dict[int, Group]
    places: dict[int, str]
    last: dict[tuple[str, int, int], Last]
    stack_file: Path

    @classmethod
    def read(cls, path: Path) -> "Rank | None":
        """Return a reading of a file; None if it cannot be read or is incomplete."""
        try:
            raw = path.read_bytes()
        except OSError:
            return None
        if len(raw) != SIZE or not raw.startswith(MAGIC):
            return None
        rank = cls.from_buffer_copy(raw)
        rank.stack_file = path.with_suffix(".stack")
        rank.groups, rank.places = {}, {}
        rank._read_names(path.with_suffix(".names"))
        rank.last = {
            (rank.groups[last.group].name, last.peer, last.direction): last
            for last in rank.channels
            if last.number and last.group in rank.groups
        }
        return rank

    def _read_names(self, path: Path) -> None:
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            return
        for line in lines:
            with suppress(ValueError, KeyError, TypeError):  # the rank is writing this line, or died while writing it
                entry = json.loads(line)
                if "group" in entry:
                    group = Group(entry["name"], entry["description"], tuple(entry["ranks"]))
                    self.groups[entry["group"]] = group
                else:
                    self.places[entry["place"]] = entry["name"]

    @property
    def frames(self) -> list[Event]:
        """Return the open phases and waits, the outermost first."""
        return self.stack[: self.depth]

    @property
    def wait(self) -> Event | None:
        """Return the message that the rank waits for, or None."""
        frames = self.frames
        return frames[-1] if frames and frames[-1].kind == WAIT else None

    @property
    def phases(self) -> tuple[str, ...]:
        """Return the names of the open phases, the outermost first."""
        return tuple(PHASES[frame.what] for frame in self.frames if frame.kind == ENTER)

    @property
    def is_over(self) -> bool:
        """True if the rank has ended its run without an error."""
        return self.phases[:1] == ("end",)

    def issued(self, group: str, peer: int, direction: int) -> int:
        """Return the number of messages that the rank has issued in a channel."""
        last = self.last.get((group, peer, direction))
        return last.number if last else 0

    @property
    def reading(self) -> str:
        """Return the files that the rank is reading."""
        return self.notes[READING].value.decode(errors="replace")

    @property
    def error(self) -> str:
        """Return the error that ended the rank."""
        return self.notes[ERROR].value.decode(errors="replace")

    @property
    def seen_at(self) -> float:
        """Return the Unix time of the last heartbeat."""
        return self.beat_at + self.offset

    @property
    def host(self) -> str:
        """Return the name of the rank's machine."""
        return self.hostname.decode(errors="replace")

    @property
    def is_on_this_host(self) -> bool:
        """True if the rank runs, or ran, on this machine."""
        return self.host == socket.gethostname()

    @property
    def now(self) -> float:
        """Return the current time of the rank's clock, estimated for ranks on other machines."""
        return time.monotonic() if self.is_on_this_host else time.time() - self.offset


def newest_start(run_dir: Path) -> Path:
    """Return the folder of the newest start of a run. Raises UserError if there is none."""
    try:
        starts = [path for path in (run_dir / FOLDER).iterdir() if any(path.glob("rank_*.bin"))]
    except OSError:
        starts = []
    if not starts:
        files = f"{FOLDER}/*/rank_*.bin"
        others = runs_within(run_dir, files) or ": is it the run.dir of a run?"
        raise UserError(f"{run_dir} has no flight recorder files ({files}){others}")
    return max(starts, key=start_time)


def start_time(folder: Path) -> float:
    """Return the Unix time when the ranks of a start last opened their files. It uses the .names files: the .bin files
    change with every page written."""
    return max((path.stat().st_mtime for path in folder.glob("rank_*.names")), default=0.0)


def read_ranks(folder: Path, since: float = 0.0, beat: Callable[[], object] = lambda: None) -> dict[int, Rank]:
    """Return all ranks of a start that have a complete file. Files of an earlier start with another world size are
    skipped.

    Args:
        folder: folder of the start, see `newest_start`.
        since: Unix time; ranks last seen earlier are skipped.
        beat: called before each file: there may be thousands, on a slow file system.
    """
    ranks = {}
    for path in sorted(folder.glob("rank_*.bin")):
        beat()
        rank = Rank.read(path)
        if rank is not None and rank.seen_at >= since - CLOCKS:
            ranks[rank.rank] = rank
    newest = max(ranks.values(), key=lambda rank: rank.seen_at, default=None)
    return {number: rank for number, rank in ranks.items() if newest and rank.world_size == newest.world_size}


GONE, STOPPED, SILENT, ALIVE = "gone", "stopped", "without a heartbeat", "alive"


def state_of(first: Rank, second: Rank) -> str:
    """Return GONE, STOPPED, SILENT or ALIVE.

    Args:
        first, second: two readings, further apart than two heartbeats.
    """
    if second.is_on_this_host:
        current = process(second.pid)
        if current is None or current.start != second.start or current.state in "ZX":
            return GONE
        if current.state in "Tt":
            return STOPPED
    return ALIVE if second.beats != first.beats else SILENT


class Process(NamedTuple):
    """An existing process."""

    state: str
    """The kernel's letter: R, S, D, T (stopped), Z (ended, not yet reaped by its parent), ..."""
    start: int
    """Start time in clock ticks since boot; identifies the process together with its number."""
    ticks: int
    """CPU time so far, in clock ticks."""


def process(pid: int) -> Process | None:
    """Return the process with this number; None if it does not exist or the system has no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return Process(fields[0], int(fields[19]), int(fields[11]) + int(fields[12]))
    except (OSError, ValueError, IndexError):
        return None


def runs(pid: int, start: int) -> bool:
    """True if the process with this number and start time has not ended."""
    current = process(pid)
    return current is not None and current.start == start and current.state not in "ZX"


def descendants(pid: int) -> Iterator[int]:
    """Yield the child processes of `pid`, and theirs."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, children.read_text().split()):
                yield child
                yield from descendants(child)


def storage_bytes(pid: int) -> int:
    """Return the bytes that a process has read from and written to storage; 0 if unknown."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    numbers = dict(line.split(": ") for line in lines)
    return int(numbers.get("read_bytes", 0)) + int(numbers.get("write_bytes", 0))
