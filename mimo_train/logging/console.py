"""Show a training run: a progress bar on a terminal, plain lines anywhere else."""

import io
import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TextIO

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from data.text_format import shown_lines
from mimo_train.logging.rank_log import to_nowhere

_SECONDS_BETWEEN_LINES = 1.0
_LEARNING_RATE, _OF_SOURCE, _TIMERS = "learning_rate/", "loss/", "timers/"
_OF_PARTS = (_OF_SOURCE, "moe/", "logps/")
"""Prefixes of the losses of single sources and layers."""
_MAIN_LOSSES = ("lm loss", "loss")


class Console:
    """Show steps, evaluations and messages. Callers pass each step at most once per log interval.

    On a terminal: one progress bar, with evaluations and messages above it. Elsewhere: at most one step line per
    second, but always the first and the last step.
    """

    def __init__(
        self,
        total_steps: int,
        done_steps: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Show `total_steps` optimizer steps, `done_steps` of them done, on `stream` (default stdout)."""
        # sys.stdout is None in a process started without it.
        self._stream = sys.stdout if stream is None else stream
        self._total, self._clock = total_steps, clock
        self._step_seconds: deque[float] = deque(maxlen=50)
        self._last_time, self._held_back = -math.inf, ""
        self._bar: Progress | None = None
        if self._stream is not None and is_terminal(self._stream):
            self._bar = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[numbers]}", markup=False),
                console=rich.console.Console(file=self._stream, force_terminal=True, highlight=False, emoji=False),
                expand=True,
                refresh_per_second=4,
            )
            self._task = self._bar.add_task("train", total=total_steps, completed=done_steps, numbers="")
            self._bar.start()

    @classmethod
    def silent(cls) -> "Console":
        """Return a console that shows nothing, for ranks that do not log."""
        console = cls(0, 0, io.StringIO())
        console._stream = None
        return console

    def step(self, step: int, values: dict[str, float], remark: str = "", losses: Iterable[str] = ()) -> None:
        """Show the values of a step; missing ones are left out.

        Args:
            values: `lm loss`, `grad_norm`, `learning_rate/<module>`, `tokens_per_second`, `step_seconds`.
            remark: appended to the line.
            losses: names of further losses.
        """
        seconds = values.get("step_seconds", math.nan)
        if math.isfinite(seconds):
            self._step_seconds.append(seconds)
        parts = step_parts(values, losses)
        if self._step_seconds and step < self._total:
            parts["left"] = f"{duration((self._total - step) * statistics.median(self._step_seconds))} left"
        if remark:
            parts["remark"] = remark
        if self._bar is not None:
            # The bar has one line: show the main numbers, the rest is in the files.
            main = [parts[name] for name in ("loss", "tokens", "seconds", "left", "remark") if name in parts]
            self._bar.update(self._task, completed=step, numbers="  ".join(main))
            return
        line, now = "  ".join([f"step {step}/{self._total}", *parts.values()]), self._clock()
        if now - self._last_time < _SECONDS_BETWEEN_LINES and step < self._total:
            self._held_back = line
            return
        self._last_time, self._held_back = now, ""
        self._print(line)

    def message(self, text: str) -> None:
        """Print `text` on its own line."""
        self._print(text)

    def _print(self, text: str) -> None:
        """Print a line. If the reader has ended (`| head`) or the disk is full, show nothing more."""
        if self._stream is None:
            return
        try:
            if self._bar is not None:
                self._bar.console.print(shown_lines(text), markup=False, soft_wrap=True)
            else:
                print(shown_lines(text), file=self._stream, flush=True)
        except OSError:
            to_nowhere(self._stream)
            self._stream = None

    def evaluation(self, step: int, values: dict[str, float]) -> None:
        """Print the values of an evaluation after `step`; keys are `eval/...`."""
        # A set without loss tokens has no loss and no exact match.
        unscored = {
            key.removesuffix("samples") for key, value in values.items() if key.endswith("/samples") and not value
        }
        measured = [
            _evaluated(key, None if key.rpartition("/")[0] + "/" in unscored and math.isnan(value) else value)
            for key, value in values.items()
        ]
        self._print("  ".join([f"evaluation at step {step}", *measured]))

    def close(self) -> None:
        """Show the last step if it was held back, and restore the terminal."""
        if self._held_back:
            self._print(self._held_back)
            self._held_back = ""
        if self._bar is not None:
            with suppress(OSError):
                self._bar.stop()


def is_terminal(stream: TextIO) -> bool:
    """True if `stream` is a terminal that can show a progress bar."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def step_parts(values: dict[str, float], losses: Iterable[str] = ()) -> dict[str, str]:
    """Return the values of a step as text by short name, in line order. Of `losses`, sources and layers are skipped."""
    parts = {}
    main = [name for name in _MAIN_LOSSES if name in values]
    named = [f"{name} {values[name]:.4f}" for name in main]
    named += [f"{name} {values[name]:.5g}" for name in losses if name not in main and not name.startswith(_OF_PARTS)]
    if named:
        parts["loss"] = "  ".join(named)
    of_sources = [
        f"{key.removeprefix(_OF_SOURCE)} {loss:.4f}" for key, loss in values.items() if key.startswith(_OF_SOURCE)
    ]
    if of_sources:
        parts["sources"] = f"({', '.join(of_sources)})"
    if "grad_norm" in values:
        parts["norm"] = f"grad norm {values['grad_norm']:.3g}"
    rates = {key.removeprefix(_LEARNING_RATE): rate for key, rate in values.items() if key.startswith(_LEARNING_RATE)}
    if len(set(rates.values())) == 1:
        parts["rate"] = f"lr {next(iter(rates.values())):.1e}"
    elif rates:
        parts["rate"] = "lr " + " ".join(f"{name} {rate:.1e}" for name, rate in rates.items())
    if "tokens_per_second" in values:
        parts["tokens"] = f"{values['tokens_per_second']:,.0f} tokens/s"
    if "step_seconds" in values:
        parts["seconds"] = f"{values['step_seconds']:.3g} s/step"
    timers = [f"{key.removeprefix(_TIMERS)} {value:.3g} s" for key, value in values.items() if key.startswith(_TIMERS)]
    if timers:
        parts["timers"] = f"({', '.join(timers)})"
    return parts


def duration(seconds: float) -> str:
    """Return a duration in one or two units: 45 s, 2 min, 3 h 20 min, 2 d 4 h."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 59.5:
        return f"{seconds:.0f} s" if seconds >= 1 or seconds == 0 else f"{seconds:.2g} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(minutes / 60)
    return f"{hours // 24} d {hours % 24} h"


def _evaluated(key: str, value: float | None) -> str:
    of_set, _, key = key.removeprefix("eval/").rpartition("/")
    before = f"{of_set} " if of_set else ""
    name = before + key.replace("_", " ")
    if value is None:
        return f"no {name}"
    if key == "samples":
        return f"{before}{value:.0f} samples"
    return f"{name} {value:.1%}" if key == "exact_match" else f"{name} {value:.4g}"


_SECONDS_BETWEEN_COUNTS = 10.0


class CountBar:
    """Show how many of `total` are done and the remaining time; off a terminal, a line only every few seconds.

    Attributes:
        done: number done.
    """

    def __init__(
        self,
        what: str,
        total: int | None,
        unit: str = "",
        *,
        stream: TextIO | None = None,
        write: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Start counting.

        Args:
            what: the activity, such as "counting the tokens of texts".
            total: None if unknown.
            unit: what is counted, such as "samples".
            stream: default: stderr.
            write: prints a line; replaces the bar.
        """
        self._what, self._total, self._unit, self.done = what, total, f" {unit}" if unit else "", 0
        self._stream = sys.stderr if stream is None else stream
        self._write, self._clock = write or partial(print, file=self._stream, flush=True), clock
        self._start = self._last = clock()
        self._bar: Progress | None = None
        if write is None and is_terminal(self._stream):
            console = rich.console.Console(file=self._stream, force_terminal=True)
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task(what, total=total)
            self._bar.start()

    def add(self, number: int) -> None:
        """Count `number` more as done."""
        self.done += number
        now = self._clock()
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done)
        elif self.done and now - self._last >= _SECONDS_BETWEEN_COUNTS:
            self._last = now
            of = left = ""
            if self._total is not None:
                of = f" of {self._total:,}"
                left = f", {duration((now - self._start) / self.done * (self._total - self.done))} left"
            self._write(f"{self._what}: {self.done:,}{of}{self._unit}{left}")

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.stop()


def progress_bar(what: str, total: int, unit: str, shows: bool) -> CountBar:
    """Return a count with the remaining time; it shows nothing unless `shows`."""
    return CountBar(what, total, unit) if shows else CountBar(what, total, unit, write=lambda text: None)
