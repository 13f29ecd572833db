"""Read the recorder files of a live or dead run, and the state of its processes from /proc."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mimo_train.config.errors import UserError
from mimo_train.config.paths import runs_within
from mimo_train.flight import file_format
from mimo_train.flight.file_format import FOLDER

CLOCKS = 10.0
"""Largest difference in seconds between the clocks of machines."""


class Event(NamedTuple):
    """A phase that began, or a message that was issued or awaited; fields as in `file_format.EVENT`."""

    number: int
    at: float
    kind: int
    what: int
    place: int
    direction: int
    microbatch: int
    group: int
    peer: int
    message: int
    nbytes: int
    step: int


class Last(NamedTuple):
    """The last message that a rank issued in a channel."""

    number: int
    operation: int
    phase: int
    step: int
    at: float
    nbytes: int


class Group(NamedTuple):
    """A process group; its name is the same on all of its ranks."""

    name: str
    description: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks)) if len(self.ranks) <= 8 else f"{len(self.ranks)} ranks"
        return f"{self.description or f'group {self.name}'} [{ranks}]"


@dataclass(frozen=True)
class Rank:
    """One reading of a rank's file. Times are in the rank's monotonic clock."""

    rank: int
    world_size: int
    pid: int
    start: int
    launcher: int
    offset: float
    host: str
    beats: int
    beat_at: float
    queued: bool
    """True if the host runs ahead of a device."""
    events: int
    progressed_at: float
    step: int
    frames: tuple[Event, ...]
    groups: dict[int, Group]
    places: dict[int, str]
    last: dict[tuple[str, int, int], Last]
    """Last messages by group name, peer (-1: collectives) and direction."""
    ring: tuple[Event, ...]
    reading: str
    error: str
    stack_file: Path

    @property
    def wait(self) -> Event | None:
        """Return the message that the rank waits for, or None."""
        return self.frames[-1] if self.frames and self.frames[-1].kind == file_format.WAIT else None

    @property
    def phases(self) -> tuple[str, ...]:
        """Return the names of the open phases, the outermost first."""
        return tuple(_name(file_format.PHASES, frame.what) for frame in self.frames if frame.kind == file_format.ENTER)

    @property
    def is_over(self) -> bool:
        """True if the rank has ended its run without an error."""
        return self.phases[:1] == ("end",)

    def issued(self, group: str, peer: int, direction: int) -> int:
        """Return the number of messages that the rank has issued in a channel."""
        last = self.last.get((group, peer, direction))
        return last.number if last else 0

    @property
    def seen_at(self) -> float:
        """Return the Unix time of the last heartbeat."""
        return self.beat_at + self.offset

    @property
    def here(self) -> bool:
        """True if the rank runs, or ran, on this machine."""
        return self.host == socket.gethostname()

    @property
    def now(self) -> float:
        """Return the current time of the rank's clock, estimated for ranks on other machines."""
        return time.monotonic() if self.here else time.time() - self.offset


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


def read_ranks(
    folder: Path, first: int | None = None, since: float = 0.0, beat: Callable[[], object] | None = None
) -> dict[int, Rank]:
    """Return all ranks of a start that have a complete file. Files of an earlier start with another world size are
    skipped.

    Args:
        folder: folder of the start, see `newest_start`.
        first: read only this many files.
        since: Unix time; ranks last seen earlier are skipped.
        beat: called before each file: there may be thousands, on a slow file system.
    """
    ranks = {}
    for path in sorted(folder.glob("rank_*.bin"))[:first]:
        if beat is not None:
            beat()
        try:
            raw = path.read_bytes()
        except OSError:
            continue
        if len(raw) == file_format.SIZE and raw.startswith(file_format.MAGIC):
            rank = _rank(path, raw)
            if rank.seen_at >= since - CLOCKS:
                ranks[rank.rank] = rank
    newest = max(ranks.values(), key=lambda rank: rank.seen_at, default=None)
    return {number: rank for number, rank in ranks.items() if newest and rank.world_size == newest.world_size}


def _rank(path: Path, raw: bytes) -> Rank:
    _, rank, world, pid, start, launcher, offset, host = file_format.HEAD.unpack_from(raw, file_format.HEAD_AT)
    beats, beat_at, events, progressed_at, step = file_format.LIVE.unpack_from(raw, file_format.LIVE_AT)
    groups, places = _names(path.with_suffix(".names"))
    last = {}
    for number in range(file_format.MAX_SLOTS):
        at = file_format.SLOTS_AT + number * file_format.SLOT_SIZE
        group, direction, operation, peer, message, phase, _, of_step, when, nbytes = file_format.SLOT.unpack_from(
            raw, at
        )
        if message and group in groups:
            last[groups[group].name, peer, direction] = Last(message, operation, phase, of_step, when, nbytes)
    depth = min(raw[file_format.DEPTH_AT], file_format.MAX_DEPTH)
    ring = (_event(raw, file_format.RING_AT + number * file_format.EVENT_SIZE) for number in range(file_format.RING))
    return Rank(
        rank=rank,
        world_size=world,
        pid=pid,
        start=start,
        launcher=launcher,
        offset=offset,
        host=host.rstrip(b"\0").decode(errors="replace"),
        beats=beats,
        beat_at=beat_at,
        queued=bool(raw[file_format.QUEUED_AT]),
        events=events,
        progressed_at=progressed_at,
        step=step,
        frames=tuple(_event(raw, file_format.FRAMES_AT + number * file_format.EVENT_SIZE) for number in range(depth)),
        groups=groups,
        places=places,
        last=last,
        ring=tuple(sorted(event for event in ring if event.number)),
        reading=_note(raw, file_format.READING),
        error=_note(raw, file_format.ERROR),
        stack_file=path.with_suffix(".stack"),
    )


def _event(raw: bytes, at: int) -> Event:
    return Event(*file_format.EVENT.unpack_from(raw, at))


def _note(raw: bytes, which: int) -> str:
    at = file_format.NOTES_AT + which * file_format.NOTE_SIZE
    return raw[at : at + file_format.NOTE_SIZE].partition(b"\0")[0].decode(errors="replace")


def _names(path: Path) -> tuple[dict[int, Group], dict[int, str]]:
    groups: dict[int, Group] = {}
    places: dict[int, str] = {}
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return groups, places
    for line in lines:
        try:
            entry = json.loads(line)
            if "group" in entry:
                groups[entry["group"]] = Group(entry["name"], entry["description"], tuple(entry["ranks"]))
            else:
                places[entry["place"]] = entry["name"]
        except (ValueError, KeyError, TypeError):  # the rank is writing this line, or died while writing it
            continue
    return groups, places


def _name(names: tuple[str, ...], number: int) -> str:
    return names[number] if number < len(names) else "?"


GONE, STOPPED, SILENT, ALIVE = "gone", "stopped", "without a heartbeat", "alive"


def state_of(first: Rank, second: Rank) -> str:
    """Return GONE, STOPPED, SILENT or ALIVE.

    Args:
        first, second: two readings, further apart than two heartbeats.
    """
    if second.here:
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
    """Kill a process, and its process group if it leads one."""
    kill: Callable[[int, int], None] = os.killpg if os.getpgid(pid) == pid else os.kill
    kill(pid, signal.SIGKILL)


def storage_bytes(pid: int) -> int:
    """Return the bytes that a process has read from and written to storage; 0 if unknown."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    numbers = dict(line.split(": ") for line in lines)
    return int(numbers.get("read_bytes", 0)) + int(numbers.get("write_bytes", 0))
