"""The recorder of this process: it stores every phase and message in a memory-mapped file.

Each process has one recorder, `RECORDER`, because phases, messages and places come from unrelated code. Before `open`,
or if the file cannot be created, it writes into plain memory, so callers need no checks.
"""

import json
import mmap
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from mimo_train.flight.file_format import (
    CALLER,
    DEPTH_AT,
    ENTER,
    EVENT,
    EVENT_SIZE,
    FOLDER,
    FRAMES_AT,
    HEAD,
    HEAD_AT,
    ISSUE,
    LIVE,
    LIVE_AT,
    MAGIC,
    MAX_DEPTH,
    MAX_SLOTS,
    NOTE_SIZE,
    NOTES_AT,
    NUMBER_OF,
    QUEUED_AT,
    REPORT,
    RING,
    RING_AT,
    SIZE,
    SLOT,
    SLOT_SIZE,
    SLOTS_AT,
    STEP,
    STEP_AT,
    WAIT,
)
from mimo_train.flight.read import process

KEPT_STARTS = 2
"""Number of newest starts whose files are kept."""

_now, _event, _slot = time.monotonic, EVENT.pack_into, SLOT.pack_into


class Channel:
    """One direction between two ranks of a group, or the collectives of a group.

    Attributes:
        issued: messages so far.
    """

    __slots__ = ("at", "direction", "group", "issued", "peer")

    def __init__(self, at: int, group: int, peer: int, direction: int):
        self.at, self.group, self.peer, self.direction, self.issued = at, group, peer, direction, 0


class Recorder:
    """Record what this rank is doing. Only one thread at a time may call methods outside `other threads` below.

    Attributes:
        step: the last step that began, counted from 1; 0 before.
        folder: folder of this start; None while nothing is recorded.
        in_use: True after `open`, even if the file could not be created.
        opened: creation time of the file, by the file system's clock.
    """

    def __init__(self) -> None:
        self._map: mmap.mmap | bytearray = bytearray(SIZE)
        self._names: IO[str] | None = None
        self._clear()
        self.folder: Path | None = None
        self.rank, self.opened, self.in_use = 0, 0.0, False

    def _clear(self) -> None:
        self.step = self._events = self._ticks = self._depth = self._phase = self._beats = 0
        self._place, self._direction, self._microbatch = 0, 0, -1
        self._places: dict[str, int] = {}
        self._slots = 0

    def open(self, run_dir: Path, rank: int, world_size: int, launcher: int = 0) -> Path | None:
        """Start recording into a file of `run_dir`. A file that cannot be created is no error: the run reports a bad
        folder itself.

        Returns:
            Folder of this start; None if the file cannot be created.
        """
        self.close()
        self.in_use = True
        folder = run_dir / FOLDER / _start_name()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if rank == 0:
                _remove_left(folder, world_size)
            # Create a new file instead of truncating: a process that still maps the old one would die of SIGBUS.
            with suppress(FileNotFoundError):
                _file(folder, rank).unlink()
            with open(_file(folder, rank), "x+b") as file:
                file.truncate(SIZE)
                os.posix_fallocate(file.fileno(), 0, SIZE)  # storing into a hole is also fatal on a full disk
                self._map = mmap.mmap(file.fileno(), SIZE)
            self._names = open(_file(folder, rank).with_suffix(".names"), "w", buffering=1, encoding="utf-8")
            self.opened = os.fstat(self._names.fileno()).st_mtime
        except OSError:
            self._map = bytearray(SIZE)
        else:
            self.folder = folder
        self._clear()
        self.rank, this = rank, process(os.getpid())
        start, offset = this.start if this else 0, time.time() - _now()
        host = socket.gethostname().encode()[:63]
        HEAD.pack_into(self._map, HEAD_AT, MAGIC, rank, world_size, os.getpid(), start, launcher, offset, host)
        self.to("start")
        self.beat(_now())
        return self.folder

    def close(self) -> None:
        """Stop recording; the file stays."""
        if self._names is not None:
            self._names.close()
        # Leave the map to the garbage collector: another thread may be about to write into it.
        self._map, self._names, self.folder, self.in_use = bytearray(SIZE), None, None, False

    def discard(self) -> None:
        """Close and remove the file: another run uses the folder, and this start has done nothing in it."""
        folder = self.folder
        self.close()
        if folder is not None:
            with suppress(OSError):
                for suffix in (".bin", ".names", ".stack"):
                    _file(folder, self.rank).with_suffix(suffix).unlink(missing_ok=True)
                folder.rmdir()

    # -- phases

    def to(self, name: str) -> None:
        """Begin a phase of the run; the previous phase ends."""
        self._depth, self._place, self._direction, self._microbatch = 0, 0, 0, -1
        self.enter(name)

    def enter(self, name: str) -> None:
        """Begin a phase inside the current one."""
        self._phase = number = NUMBER_OF[name]
        self.push(ENTER, number, 0, -1, 0)

    def leave(self) -> None:
        """End the innermost phase, or the wait for a message."""
        self._events += 1
        self._depth = depth = max(0, self._depth - 1)
        self._map[DEPTH_AT] = min(depth, MAX_DEPTH)
        if 0 < depth <= MAX_DEPTH:
            at = FRAMES_AT + (depth - 1) * EVENT_SIZE
            if self._map[at + 16] == ENTER:
                self._phase = self._map[at + 17]

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Record the block as a phase outside the module graph."""
        self._place, self._direction, self._microbatch = 0, 0, -1
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def push(self, kind: int, what: int, group: int, peer: int, number: int) -> None:
        """Open a frame: a phase, or the wait for message `number` of a channel."""
        self._events = events = self._events + 1
        depth = self._depth
        if depth < MAX_DEPTH:
            _event(
                self._map, FRAMES_AT + depth * EVENT_SIZE, events, _now(), kind, what, self._place, self._direction,
                self._microbatch, group, peer, number, 0, self.step,
            )  # fmt: skip
        self._depth = depth = depth + 1
        self._map[DEPTH_AT] = min(depth, MAX_DEPTH)

    def begin_step(self, step: int) -> None:
        """Record that step `step`, counted from 1, begins."""
        self.step, self._place, self._direction, self._microbatch = step, 0, 0, -1
        # Do not wait for the next heartbeat: the rank may end before it.
        STEP.pack_into(self._map, STEP_AT, step)

    def at(self, place: str, direction: int, microbatch: int) -> None:
        """Set where later messages belong.

        Args:
            place: an edge `source->destination` or a module.
            direction: FORWARD or BACKWARD.
            microbatch: counted from 0.
        """
        number = self._places.get(place)
        if number is None:
            number = self._places[place] = len(self._places) + 1
            self._name({"place": number, "name": place})
        self._place, self._direction, self._microbatch = number, direction, microbatch

    def queued(self) -> None:
        """Record that messages are queued on a device: the host waits only for the device."""
        self._map[QUEUED_AT] = 1

    @property
    def spins(self) -> bool:
        """True if waiting for device messages takes CPU time. False in the first step, which may compile."""
        return bool(self._map[QUEUED_AT]) and self.step > 1

    @property
    def rests(self) -> bool:
        """True if the program that makes the steps is between two calls and waits for no message."""
        kind, what = self._map[FRAMES_AT + 16 : FRAMES_AT + 18]
        return self._depth == 1 and (kind, what) == (ENTER, NUMBER_OF[CALLER])

    # -- messages

    def group(self, number: int, name: str, description: str, ranks: Sequence[int]) -> None:
        """Name a process group of this rank."""
        self._name({"group": number, "name": name, "description": description, "ranks": list(ranks)})

    def channel(self, group: int, peer: int, direction: int) -> Channel:
        """Return a new channel without messages; `peer` is -1 for collectives."""
        self._slots += 1
        return Channel(self._slots - 1, group, peer, direction)

    def forget_messages(self) -> None:
        """Restart message numbers at 1 because process groups are rebuilt."""
        self._slots, end = 0, RING_AT + RING * EVENT_SIZE
        self._map[SLOTS_AT:end] = bytes(end - SLOTS_AT)

    def issue(self, channel: Channel, operation: int, nbytes: int) -> int:
        """Record that a message is about to be issued; return its number in the channel, counted from 1."""
        channel.issued = number = channel.issued + 1
        self._events = events = self._events + 1
        now, buffer, microbatch = _now(), self._map, self._microbatch
        if channel.at < MAX_SLOTS:
            _slot(
                buffer, SLOTS_AT + channel.at * SLOT_SIZE, channel.group, channel.direction, operation, channel.peer,
                number, self._phase, microbatch, self.step, now, nbytes,
            )  # fmt: skip
        _event(
            buffer, RING_AT + events % RING * EVENT_SIZE, events, now, ISSUE, operation, self._place, self._direction,
            microbatch, channel.group, channel.peer, number, nbytes, self.step,
        )  # fmt: skip
        return number

    def wait(self, channel: Channel, operation: int, number: int) -> None:
        """Record that the wait for a message begins; `leave` ends it."""
        self.push(WAIT, operation, channel.group, channel.peer, number)

    # -- other threads

    @property
    def events(self) -> int:
        """Return the number of signs of progress."""
        return self._events + self._ticks

    def tick(self) -> None:
        """Count a sign of progress inside a long phase. A separate counter keeps message numbers unchanged."""
        self._ticks += 1

    def beat(self, progressed: float) -> None:
        """Write a heartbeat with the time of the last progress."""
        self._beats += 1
        LIVE.pack_into(self._map, LIVE_AT, self._beats, _now(), self.events, progressed, self.step)

    def note(self, which: int, text: str) -> None:
        """Write one of the notes, truncated to its size."""
        raw = text.encode(errors="replace")[: NOTE_SIZE - 1]
        at = NOTES_AT + which * NOTE_SIZE
        self._map[at : at + NOTE_SIZE] = raw + bytes(NOTE_SIZE - len(raw))

    def stack_file(self) -> Path | None:
        """Return the file for this rank's stacks when a run hangs."""
        return None if self.folder is None else _file(self.folder, self.rank).with_suffix(".stack")

    def _name(self, entry: dict[str, object]) -> None:
        if self._names is not None:
            with suppress(OSError, ValueError):  # the disk is full, or the recorder was closed
                self._names.write(json.dumps(entry) + "\n")


RECORDER = Recorder()


def remove_old_starts(run_dir: Path) -> None:
    """Remove the files of all but the newest starts. Only the process that holds the run's lock may call it."""
    with suppress(OSError):
        starts = sorted((run_dir / FOLDER).iterdir(), key=lambda path: path.stat().st_mtime)
        for folder in starts[:-KEPT_STARTS]:
            if folder.is_dir() and not folder.is_symlink():
                for file in folder.iterdir():
                    file.unlink(missing_ok=True)
                folder.rmdir()


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.bin"


def _remove_left(folder: Path, world_size: int) -> None:
    """Remove files of an earlier start of the same name that this start does not overwrite."""
    (folder / REPORT).unlink(missing_ok=True)
    for file in folder.glob("rank_*.*"):
        number = file.stem.removeprefix("rank_")
        if number.isdecimal() and int(number) >= world_size:
            file.unlink(missing_ok=True)


def _start_name() -> str:
    """Return a name that all ranks of this start share: address, port, the launcher's run id, and the attempt.

    A process without a launcher uses its host and process id. The name is new at each start, with two exceptions. On
    several nodes of plain torchrun the run id is always "none", and ranks without torchrun or scheduler share nothing
    new.
    """
    job = [name] if (name := scheduled_job()) else []
    port = os.environ.get("MASTER_PORT", "")
    if not port or os.environ.get("WORLD_SIZE", "1") == "1":
        parts = [socket.gethostname(), str(os.getpid())]
    else:
        parts = [os.environ.get("MASTER_ADDR", ""), port, os.environ.get("TORCHELASTIC_RUN_ID", "")]
        parts.append(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        # torchrun makes a folder with a random name for each start, and subfolders for attempt and rank.
        errors = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
        if parts[2] == "none" and os.environ.get("GROUP_WORLD_SIZE") == "1" and len(errors.parts) > 3:
            parts.append(errors.parts[-4])
    return re.sub(r"[^A-Za-z0-9.-]+", "_", "-".join([*parts, *job]))[-120:]


def scheduled_job() -> str:
    """Return the scheduler's job name, new at every start (`slurm-JOB.RESTART`); empty if there is none."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"slurm-{job}.{os.environ.get('SLURM_RESTART_COUNT', '0')}" if job else ""
