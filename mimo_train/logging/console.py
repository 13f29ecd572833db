"""Show a training run: a progress bar on a terminal, plain lines anywhere else."""

import io
import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol, TextIO

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from data.text_format import shown_lines
from mimo_train.logging.rank_log import to_nowhere

_SECONDS_BETWEEN_LINES = 1.0
_LEARNING_RATE, _OF_SOURCE, _TIMERS = "learning_rate/", "loss/", "timers/"
_OF_PARTS = (_OF_SOURCE, "moe/")
"""Prefixes of the losses of single sources and layers."""


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
        view: "View | None" = None,
    ):
        """Show `total_steps` optimizer steps, `done_steps` of them done, on `stream` (default stdout) or in `view`."""
        # sys.stdout is None in a process started without it.
        self._stream = stream = (sys.stdout or io.StringIO()) if stream is None else stream
        self._total = total_steps
        self._step_seconds: deque[float] = deque(maxlen=50)
        self._view = view or view_on(stream, total_steps, done_steps, clock)

    @classmethod
    def silent(cls) -> "Console":
        """Return a console that shows nothing, for ranks that do not log."""
        return cls(0, 0, view=_Nothing())

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
            left = (self._total - step) * statistics.median(self._step_seconds)
            parts["left"] = f"{duration(left)} left"
        if remark:
            parts["remark"] = remark
        self._show(lambda: self._view.step(step, self._total, parts))

    def message(self, text: str) -> None:
        """Print `text` on its own line."""
        self._show(lambda: self._view.print(text))

    def evaluation(self, step: int, values: dict[str, float]) -> None:
        """Print the values of an evaluation after `step`; keys are `eval/...`."""
        # A set without loss tokens has no loss and no exact match.
        unscored = {
            key.removesuffix("samples") for key, value in values.items() if key.endswith("/samples") and not value
        }
        shown = [
            _evaluated(key, None if key.rpartition("/")[0] + "/" in unscored and math.isnan(value) else value)
            for key, value in values.items()
        ]
        text = "  ".join([f"evaluation at step {step}", *shown])
        self._show(lambda: self._view.print(text))

    def close(self) -> None:
        """Show the last step if it was held back, and restore the terminal."""
        self._show(self._view.close)

    def _show(self, what: Callable[[], None]) -> None:
        """Stop showing anything if the reader has ended (`| head`) or the disk is full; training continues."""
        try:
            what()
        except OSError:
            self._view = _Nothing()
            to_nowhere(self._stream)


class View(Protocol):
    """Output of a console."""

    def step(self, step: int, total: int, parts: dict[str, str]) -> None: ...

    def print(self, text: str) -> None: ...

    def close(self) -> None: ...


class _Nothing:
    def step(self, step: int, total: int, parts: dict[str, str]) -> None:
        pass

    def print(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class _Lines:
    def __init__(self, stream: TextIO, clock: Callable[[], float]):
        self._stream = stream
        self._clock = clock
        self._last_time: float | None = None
        self._held_back: str | None = None

    def step(self, step: int, total: int, parts: dict[str, str]) -> None:
        line = "  ".join([f"step {step}/{total}", *parts.values()])
        now = self._clock()
        if self._last_time is not None and now - self._last_time < _SECONDS_BETWEEN_LINES and step < total:
            self._held_back = line
            return
        self._last_time = now
        self._held_back = None
        self.print(line)

    def print(self, text: str) -> None:
        self._stream.write(shown_lines(text) + "\n")
        self._stream.flush()

    def close(self) -> None:
        if self._held_back is not None:
            self.print(self._held_back)
            self._held_back = None


class _Bar:
    def __init__(self, stream: TextIO, total: int, done: int):
        self._console = rich.console.Console(file=stream, force_terminal=True, highlight=False, emoji=False)
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=self._console,
            expand=True,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("train", total=total, completed=done, numbers="")
        self._progress.start()

    def step(self, step: int, total: int, parts: dict[str, str]) -> None:
        # The bar has one line: show the main numbers, the rest is in the files.
        shown = [parts[name] for name in ("loss", "tokens", "seconds", "left", "remark") if name in parts]
        self._progress.update(self._task, completed=step, numbers="  ".join(shown))

    def print(self, text: str) -> None:
        self._console.print(shown_lines(text), markup=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()


def view_on(stream: TextIO, total_steps: int, done_steps: int, clock: Callable[[], float] = time.monotonic) -> View:
    """Return a progress bar on a terminal, else plain lines."""
    on_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    return _Bar(stream, total_steps, done_steps) if on_terminal else _Lines(stream, clock)


def step_parts(values: dict[str, float], losses: Iterable[str] = ()) -> dict[str, str]:
    """Return the values of a step as text by short name, in line order. Of `losses`, sources and layers are skipped."""
    parts = {}
    named = [f"lm loss {values['lm loss']:.4f}"] if "lm loss" in values else []
    named += [f"{name} {values[name]:.5g}" for name in losses if name != "lm loss" and not name.startswith(_OF_PARTS)]
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
        self._write, self._clock = write or self._print, clock
        self._start = self._last = clock()
        self._bar: Progress | None = None
        if write is None and self._stream.isatty() and os.environ.get("TERM") != "dumb":
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
        elif now - self._last >= _SECONDS_BETWEEN_COUNTS:
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

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)
