"""The recorder of this process: it stores every phase and message in a memory-mapped file.

Each process has one recorder, `RECORDER`, because phases, messages and places come from unrelated code. Before `open`,
or if the file cannot be created, it writes into plain memory, so callers need no checks.
"""

import ctypes
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
    CHANNELS_AT,
    ENTER,
    EVENT_SIZE,
    FOLDER,
    ISSUE,
    LAST_SIZE,
    MAGIC,
    MAX_CHANNELS,
    MAX_DEPTH,
    NOTE_SIZE,
    NOTES_AT,
    NUMBER_OF,
    RING,
    RING_AT,
    SIZE,
    STACK_AT,
    WAIT,
    Event,
    Last,
    Record,
    packer,
)
from mimo_train.flight.read import process

KEPT_STARTS = 2
"""Number of newest starts whose files are kept."""

_now, _event, _last = time.monotonic, packer(Event).pack_into, packer(Last).pack_into


class Channel:
    """One direction between two ranks of a group, or the collectives of a group; `issued` counts its messages."""

    __slots__ = ("at", "direction", "group", "issued", "peer")

    def __init__(self, at: int, group: int, peer: int, direction: int):
        self.at, self.group, self.peer, self.direction, self.issued = at, group, peer, direction, 0


class Recorder:
    """Record what this rank is doing. Only one thread at a time may call methods outside `other threads` below.

    Attributes:
        record: what is in the file.
        step: the last step that began, counted from 1; 0 before.
        folder: folder of this start; None while nothing is recorded.
        in_use: True after `open`, even if the file could not be created.
        opened: creation time of the file, by the file system's clock.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self._names: IO[str] | None = None
        self.rank, self.opened = 0, 0.0
        self.close()

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
            # Create a new file instead of truncating: a process that still maps the old one would die of SIGBUS.
            with suppress(FileNotFoundError):
                _file(folder, rank).unlink()
            with open(_file(folder, rank), "x+b") as file:
                os.posix_fallocate(file.fileno(), 0, SIZE)  # storing into a hole is fatal on a full disk
                self.record = Record.from_buffer(mmap.mmap(file.fileno(), SIZE))
            self._names = open(_file(folder, rank).with_suffix(".names"), "w", buffering=1, encoding="utf-8")
            self.opened = os.fstat(self._names.fileno()).st_mtime
        except OSError:
            self.record = Record()
        else:
            self.folder = folder
        self.rank, this, record = rank, process(os.getpid()), self.record
        record.magic, record.rank, record.world_size, record.launcher = MAGIC, rank, world_size, launcher
        record.pid, record.start, record.offset = os.getpid(), this.start if this else 0, time.time() - _now()
        record.hostname = socket.gethostname().encode()[:63]
        self.to("start")
        self.beat(_now())
        return self.folder

    def close(self) -> None:
        """Stop recording; the file stays."""
        if self._names is not None:
            self._names.close()
        # Leave the map to the garbage collector: another thread may be about to write into it.
        self.record, self._names, self.folder, self.in_use = Record(), None, None, False
        self.step = self._events = self._ticks = self._depth = self._phase = 0
        self._place, self._direction, self._microbatch = 0, 0, -1
        self._places: dict[str, int] = {}
        self._channels = 0

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
        self.record.depth = min(depth, MAX_DEPTH)
        if 0 < depth <= MAX_DEPTH:
            event = self.record.stack[depth - 1]
            if event.kind == ENTER:
                self._phase = event.what

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
                self.record, STACK_AT + depth * EVENT_SIZE, events, _now(), 0, number, self.step, group, peer,
                self._microbatch, self._place, kind, what, self._direction,
            )  # fmt: skip
        self._depth = depth = depth + 1
        self.record.depth = min(depth, MAX_DEPTH)

    def begin_step(self, step: int) -> None:
        """Record that step `step`, counted from 1, begins."""
        self.step, self._place, self._direction, self._microbatch = step, 0, 0, -1
        self.record.step = step  # do not wait for the next heartbeat: the rank may end before it

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
        self.record.queued = 1

    @property
    def spins(self) -> bool:
        """True if waiting for device messages takes CPU time. False in the first step, which may compile."""
        return bool(self.record.queued) and self.step > 1

    @property
    def rests(self) -> bool:
        """True if the program that makes the steps is between two calls and waits for no message."""
        phase = self.record.stack[0]
        return self._depth == 1 and (phase.kind, phase.what) == (ENTER, NUMBER_OF[CALLER])

    # -- messages

    def group(self, number: int, name: str, description: str, ranks: Sequence[int]) -> None:
        """Name a process group of this rank."""
        self._name({"group": number, "name": name, "description": description, "ranks": list(ranks)})

    def channel(self, group: int, peer: int, direction: int) -> Channel:
        """Return a new channel without messages; `peer` is -1 for collectives."""
        self._channels += 1
        return Channel(self._channels - 1, group, peer, direction)

    def forget_messages(self) -> None:
        """Restart message numbers at 1 because process groups are rebuilt."""
        self._channels = 0
        ctypes.memset(ctypes.byref(self.record, CHANNELS_AT), 0, NOTES_AT - CHANNELS_AT)

    def issue(self, channel: Channel, operation: int, nbytes: int) -> int:
        """Record that a message is about to be issued; return its number in the channel, counted from 1."""
        channel.issued = number = channel.issued + 1
        self._events = events = self._events + 1
        record, group, peer = self.record, channel.group, channel.peer
        if channel.at < MAX_CHANNELS:
            _last(
                record, CHANNELS_AT + channel.at * LAST_SIZE, number, self.step, group, peer, operation, self._phase,
                channel.direction,
            )  # fmt: skip
        _event(
            record, RING_AT + events % RING * EVENT_SIZE, events, _now(), nbytes, number, self.step, group, peer,
            self._microbatch, self._place, ISSUE, operation, self._direction,
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
        record = self.record
        record.events, record.progressed_at, record.beat_at = self.events, progressed, _now()
        record.beats += 1

    def note(self, which: int, text: str) -> None:
        """Write one of the notes, truncated to its size."""
        self.record.notes[which].value = text.encode(errors="replace")[: NOTE_SIZE - 1]

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


def _start_name() -> str:
    """Return a name that all ranks of this start share: address, port, the launcher's run id, attempt, and job.

    A process without a launcher uses its host and process id. The name is new at each start of our launcher and of
    schedulers. Other starts may share a folder: readers ignore files that are older than their own.
    """
    port = os.environ.get("MASTER_PORT", "")
    if not port or os.environ.get("WORLD_SIZE", "1") == "1":
        parts = [socket.gethostname(), str(os.getpid())]
    else:
        names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
        parts = [os.environ.get("MASTER_ADDR", ""), port, *(os.environ.get(name, "") for name in names)]
    return re.sub(r"[^A-Za-z0-9.-]+", "_", "-".join(filter(None, [*parts, scheduled_job()])))[-120:]


def scheduled_job() -> str:
    """Return the scheduler's job name, new at every start (`slurm-JOB.RESTART`); empty if there is none."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"slurm-{job}.{os.environ.get('SLURM_RESTART_COUNT', '0')}" if job else ""
