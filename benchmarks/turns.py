"""Sides in turns: processes that make a block of steps when they are told to, and stand still while others do.

Every side has processes of its own, forked from one that has imported everything, and stopped (SIGSTOP) while they
wait: a machine that becomes slower is slower for all sides, and idle threads of one do not count for another. Three
clocks: the processor time of the whole process, with its threads, that of the main thread, and the time on the wall.
Where a side computes on CUDA, the device has finished when a clock is read.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

ALL_THREADS, MAIN_THREAD, WALL = range(3)
"""The clocks of a `Block`."""

REDRAWS = 2000
"""Of the rounds, for an interval."""


@dataclass(frozen=True)
class Block:
    """Steps that a side has made, summed over its processes.

    Attributes:
        seconds: of a step, by each clock.
        memory: bytes at the peak: of the process, beyond what it was forked with; on CUDA those of tensors.
    """

    seconds: tuple[float, ...]
    memory: int


class Turns:
    """The child's end: waits until it may make a block of steps, and answers with its clocks."""

    def __init__(self, told: Any, answers: Any, device: str = "cpu"):
        self._told, self._answers, self._device = told, answers, device
        self._left = self._size = 0
        self._started: tuple[float, ...] | None = None
        self._base = memory("VmRSS")

    def before_step(self) -> None:
        """Call at the start of every step. Ends the process when there is nothing more to do."""
        if self._left == 0:
            if self._started is None:
                self._answer("ready")
            else:
                spent = [(end - start) / self._size for start, end in zip(self._started, self._clocks(), strict=True)]
                self._answer([*spent, self._peak()])
            line = self._told.readline().strip()
            if not line:
                os._exit(0)
            self._left = self._size = int(line)
            self._started = self._clocks()
        self._left -= 1

    def _clocks(self) -> tuple[float, ...]:
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.process_time(), time.thread_time(), time.perf_counter()

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self._device == "cuda" else memory("VmHWM") - self._base

    def _answer(self, what: Any) -> None:
        self._answers.write(json.dumps(what) + "\n")
        self._answers.flush()


def memory(name: str) -> int:
    """Bytes of this process: VmRSS, what it holds; VmHWM, the most that it held."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


class Side:
    """The processes of one side, which make blocks of steps when they are told to; a context manager.

    Args:
        run: what a process does: all that comes before its first step, then steps without end, `Turns.before_step` in
            front of each.
        folder: for the logs.
        device: that it computes on.

    Raises:
        SideEnded: a process has ended by itself; by `block` too.
    """

    def __init__(
        self, name: str, run: Callable[[Turns], None], folder: Path, *, processes: int = 1, device: str = "cpu"
    ):
        self.name = name
        self._folder, self._processes = folder, []
        self._pipes: list[tuple[Any, Any]] = []
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        for rank in range(processes):
            self._fork(run, device, rank, processes, port)
        try:
            self._hear()
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def block(self, steps: int) -> Block:
        """Make so many steps."""
        self._signal(signal.SIGCONT)
        for told, _ in self._pipes:
            told.write(f"{steps}\n")
            told.flush()
        answers = self._hear()
        self._signal(signal.SIGSTOP)
        *seconds, peak = (sum(each) for each in zip(*answers, strict=True))
        return Block(tuple(seconds), peak)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        for pipe in self._pipes:
            for end in pipe:
                end.close()
        self._processes, self._pipes = [], []

    def _fork(self, run: Callable[[Turns], None], device: str, rank: int, processes: int, port: int) -> None:
        (hear, tell), (heard, answer) = os.pipe(), os.pipe()
        process = os.fork()
        if process:
            os.close(hear), os.close(answer)
            self._processes.append(process)
            self._pipes.append((os.fdopen(tell, "w"), os.fdopen(heard)))
            return
        os.close(tell), os.close(heard)
        os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank}", MASTER_ADDR="localhost", MASTER_PORT=f"{port}")
        os.environ.update(WORLD_SIZE=f"{processes}", LOCAL_WORLD_SIZE=f"{processes}")
        log = os.open(self._log(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1), os.dup2(log, 2)
        try:
            if device == "cpu":
                torch.set_num_threads(1)
            run(Turns(os.fdopen(hear), os.fdopen(answer, "w"), device))
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(1)

    def _hear(self) -> list[Any]:
        answers = []
        for rank, (_, heard) in enumerate(self._pipes):
            line = heard.readline()
            if not line:
                last = self._log(rank).read_text(errors="replace").strip().splitlines()[-1:]
                raise SideEnded(f"rank {rank} of {self.name} has ended; its log is {self._log(rank).name}: {last}")
            answers.append(json.loads(line))
        return answers

    def _log(self, rank: int) -> Path:
        return self._folder / f"{self.name}_{rank}.log".replace(" ", "_")

    def _signal(self, number: int) -> None:
        for process in self._processes:
            os.kill(process, number)


class SideEnded(Exception):
    """A process of a side has ended by itself; the message has the last line of its log."""


def take_turns(sides: Sequence[Side], rounds: int, steps: int) -> dict[str, list[Block]]:
    """Blocks of so many steps of each side, which begin in turn."""
    found: dict[str, list[Block]] = {side.name: [] for side in sides}
    for number in range(rounds):
        for side in sides if number % 2 else sides[::-1]:
            found[side.name].append(side.block(steps))
    return found


@dataclass(frozen=True)
class Ratio:
    """Of a side to the reference: the median over rounds, and what holds 95 % of redraws of the rounds."""

    median: float
    low: float
    high: float


def ratio(blocks: Sequence[Block], reference: Sequence[Block], clock: int) -> Ratio:
    """Of two sides' seconds of a step, round by round."""
    draw = random.Random(1234)
    ratios = [own.seconds[clock] / other.seconds[clock] for own, other in zip(blocks, reference, strict=True)]
    redrawn = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(REDRAWS))
    return Ratio(statistics.median(ratios), redrawn[REDRAWS // 40], redrawn[-1 - REDRAWS // 40])


def seconds(blocks: Sequence[Block], clock: int) -> float:
    """Of a step, the median over rounds."""
    return statistics.median(block.seconds[clock] for block in blocks)


def summary(found: dict[str, list[Block]], clocks: Sequence[int] = (ALL_THREADS, MAIN_THREAD)) -> str:
    """A line for each side; the first is the reference."""
    lines = []
    reference = next(iter(found.values()))
    for name, blocks in found.items():
        line = f"{name:14}"
        for clock in clocks:
            of = ratio(blocks, reference, clock)
            line += f" | {1e3 * seconds(blocks, clock):9.2f} ms x {of.median:.3f} ({of.low:.3f} to {of.high:.3f})"
        peak = blocks[-1].memory
        lines.append(f"{line} | {peak / 2**20:7.0f} MiB x {peak / reference[-1].memory:.2f}")
    return "\n".join(lines)
