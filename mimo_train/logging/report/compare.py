"""Compare runs on one page and in one table: configs, curves, metrics at equal samples and equal time, predictions.

Everything is read from the folders of the runs, which may be going on, have failed, or be of different tasks.
"""

import json
import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from data.storage.files import replacing
from mimo_train.config.compose import leaves
from mimo_train.config.errors import UserError
from mimo_train.logging import progress
from mimo_train.logging.console import duration
from mimo_train.logging.report.charts import Chart, Column, Series, chart, columns, smooth
from mimo_train.logging.report.page import held_out_samples, render
from mimo_train.logging.report.run_summary import COLORS
from mimo_train.logging.sinks.jsonl import iter_metrics

SHOWN = 60
"""Most samples whose predictions are shown."""
_OF_PLACE = ("run.dir", "checkpoint.dir", "data.cache_dir")
"""Keys that differ between any two runs."""
_PATTERN = "*predictions*.jsonl"
_LOSSES = ("loss", "lm loss")
"""Losses of training: of a task other than sft, and of tokens."""


@dataclass(frozen=True)
class ComparedRun:
    """What the folder of a run tells."""

    name: str
    folder: Path
    config: Mapping[str, Any]
    """Values by dotted key."""
    data: Mapping[str, Column]
    """Columns of metrics.jsonl by key."""
    samples: Mapping[float, float]
    """Consumed samples by step."""
    seconds: Mapping[float, float]
    """Training time by step, in seconds: without evaluations, saves, and steps that were trained again."""
    status: str
    faults: Sequence[str] = ()
    """Files that cannot be read, and why."""

    def curve(self, key: str, by: Mapping[float, float]) -> tuple[list[float], list[float]]:
        """Return positions and values of a metric; `by`: `samples` or `seconds`. A loss of each step is smoothed."""
        column = self.data.get(key, Column())
        is_evaluation = key.startswith(("eval/", "test/"))
        values = list(column.values) if is_evaluation else smooth(column.values, len(column.values) / 50)
        pairs = sorted((by[step], value) for step, value in zip(column.steps, values, strict=True) if step in by)
        return [at for at, _ in pairs], [value for _, value in pairs]

    def at(self, key: str, by: Mapping[float, float], limit: float) -> float | None:
        """Return the last value of a metric up to a position; None if there is none."""
        positions, values = self.curve(key, by)
        number = bisect_right(positions, limit * (1 + 1e-9))
        return values[number - 1] if number else None

    def best(self, key: str, mode: str) -> tuple[float, float] | None:
        """Return (step, value) of the best finite value of a metric, the first of equals; None without one."""
        column = self.data.get(key, Column())
        pairs = [pair for pair in zip(column.steps, column.values, strict=True) if math.isfinite(pair[1])]
        choose = min if mode == "min" else max
        return choose(pairs, key=lambda pair: pair[1], default=None)


def read_run(folder: Path, name: str = "") -> ComparedRun:
    """Read the folder of a run.

    Raises:
        UserError: it is not the folder of a run.
    """
    if not any((folder / file).exists() for file in ("config.yaml", "metrics.jsonl", progress.PROGRESS_FILE)):
        raise UserError(f"RUN: {folder} is not the folder of a run. It has no config.yaml and no metrics.jsonl")
    faults: list[str] = []
    config: dict[str, Any] = {}
    try:
        config = dict(leaves(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")) or {}))
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        faults.append(f"config.yaml cannot be read: {error}")
    data: dict[str, Column] = {}
    if (folder / "metrics.jsonl").exists():
        try:
            data = columns(iter_metrics(folder / "metrics.jsonl"))
        except (OSError, UserError) as error:
            faults.append(str(error))
    consumed = data.get("consumed_samples", Column())
    samples = dict(zip(consumed.steps, consumed.values, strict=True))
    return ComparedRun(
        name or folder.resolve().name, folder, config, data, samples, _seconds(data), _status(folder, data), faults
    )


def _seconds(data: Mapping[str, Column]) -> dict[float, float]:
    column, total, before = data.get("step_seconds", Column()), 0.0, 0.0
    seconds = {}
    for step, mean in zip(column.steps, column.values, strict=True):
        total += mean * max(step - before, 0) if math.isfinite(mean) else 0.0
        seconds[step], before = total, step
    return seconds


def _status(folder: Path, data: Mapping[str, Column]) -> str:
    """Return how the last job of a run ended, and its last step."""
    ended = progress.last_exit(folder)
    steps = data["consumed_samples"].steps if "consumed_samples" in data else array("d", [0.0])
    if not ended:
        return f"running or crashed, step {max(steps):,.0f}"
    reason = ended.get("reason", "")
    reason = reason if reason == progress.FINISHED else f"stopped ({reason})"
    return f"{reason} at step {ended.get('step', '?')}" + (f": {why}" if (why := ended.get("stop_early")) else "")


def read_runs(places: Iterable[Path]) -> list[ComparedRun]:
    """Read runs by the names that tell them apart: a folder of runs, such as that of a sweep, gives all of them.

    Raises:
        UserError: a place is not the folder of a run and contains none.
    """
    folders: list[Path] = []
    for place in places:
        within = sorted(
            (path.parent for path in place.glob("*/metrics.jsonl")), key=lambda path: (len(path.name), path.name)
        )
        folders += [place] if not within or (place / "metrics.jsonl").exists() else within
    unique = list(dict.fromkeys(folder.resolve() for folder in folders))
    names = [path.name for path in unique]
    return [
        read_run(path, path.name if names.count(path.name) == 1 else f"{path.parent.name}/{path.name}")
        for path in unique
    ]


def config_differences(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """Return (key, value of each run) of every key that differs; a missing key is empty."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    rows = []
    for key in keys:
        values = [run.config[key] if key in run.config else "" for run in runs]
        if key not in _OF_PLACE and any(value != values[0] for value in values):
            rows.append((key, [_text(value) for value in values]))
    return rows


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def metric_names(runs: Sequence[ComparedRun]) -> list[str]:
    """Return the keys to compare: losses of training, then what evaluations give."""
    keys = dict.fromkeys(key for run in runs for key in run.data)
    measured = [key for key in keys if key.startswith(("eval/", "test/")) and not key.endswith("/samples")]
    return [key for key in keys if key in _LOSSES] + measured


@dataclass(frozen=True)
class MetricTable:
    """Metrics of all runs at one position."""

    title: str
    rows: list[tuple[str, list[str]]]


def metric_tables(runs: Sequence[ComparedRun]) -> list[MetricTable]:
    """Return metrics at the most samples, and at the most time, that all runs have reached, and the last of each."""
    names, tables = metric_names(runs), []
    for axis, text in (("samples", lambda limit: f"{limit:,.0f} samples"), ("seconds", lambda limit: duration(limit))):
        by = [getattr(run, axis) for run in runs]
        if not all(by):
            continue
        limit = min(max(positions.values()) for positions in by)
        rows = [(name, [run.at(name, at, limit) for run, at in zip(runs, by, strict=True)]) for name in names]
        what = "of training" if axis == "seconds" else "consumed"
        tables.append(MetricTable(f"After {text(limit)} {what}", _cells(rows)))
    rows = [(name, [run.at(name, run.samples, math.inf) for run in runs]) for name in names]
    return [*tables, MetricTable("Last values", _cells(rows))]


def _cells(rows: Iterable[tuple[str, Sequence[float | None]]]) -> list[tuple[str, list[str]]]:
    return [
        (name, ["" if value is None else f"{value:,.5g}" for value in values])
        for name, values in rows
        if any(value is not None for value in values)
    ]


def charts(runs: Sequence[ComparedRun]) -> list[Chart]:
    """Return a chart of each metric over samples, and of the losses over training time, with a curve for each run."""
    made = []
    times = max((max(run.seconds.values(), default=0.0) for run in runs), default=0.0)
    units = (("hours", 3600.0), ("minutes", 60.0), ("seconds", 0.0))
    unit, scale = next((unit, scale or 1.0) for unit, scale in units if times >= 2 * scale)
    for name in metric_names(runs):
        made.append(_chart(name, [(run, *run.curve(name, run.samples)) for run in runs], "samples", 1.0))
        if name in _LOSSES or name.endswith("/loss") and not name.startswith("test/"):
            made.append(_chart(name, [(run, *run.curve(name, run.seconds)) for run in runs], unit, scale))
    return [each for each in made if each is not None]


def _chart(
    name: str, curves: Sequence[tuple[ComparedRun, list[float], list[float]]], unit: str, scale: float
) -> Chart | None:
    kind = "dots" if name.startswith(("eval/", "test/")) else "line"
    series = [
        Series(run.name, [at / scale for at in positions], values, kind, number % COLORS)
        for number, (run, positions, values) in enumerate(curves)
        if positions
    ]
    last = max((max(each.steps) for each in series), default=0.0)
    title = name if unit == "samples" else f"{name}, by training time"
    return chart(title, "smoothed" if name in _LOSSES else "", series, last_step=last, x_name=unit)


@dataclass
class ComparedSample:
    """The predictions of several runs for a turn of a sample."""

    place: str
    question: str
    truth: str
    answers: list[tuple[str, bool | None]]
    """Answer of each run, and if it is right; None: the run has no prediction of it."""
    images: list[str] = field(default_factory=list)
    """PNG files in base64."""


def compared_samples(runs: Sequence[ComparedRun], shown: int = SHOWN) -> tuple[list[ComparedSample], int]:
    """Return samples that at least two runs have predicted, those first on which runs differ, and their total number.

    A sample is the same if its set, the name of its shard, its key and its turn are.
    """
    by_run = [_predictions(run.folder) for run in runs]
    places = dict.fromkeys(place for predictions in by_run for place in predictions)
    media = _images(runs)
    samples: list[ComparedSample] = []
    for place in places:
        entries = [predictions.get(place) for predictions in by_run]
        present = [entry for entry in entries if entry is not None]
        if len(present) < min(2, len(runs)):
            continue
        answers: list[tuple[str, bool | None]] = [
            ("", None) if entry is None else (str(entry["answer"]), bool(entry["exact_match"])) for entry in entries
        ]
        _, shard, key, turn = place
        title = f"{shard} {key}" + (f", turn {turn + 1}" if turn else "")
        first = present[0]
        question, truth = str(first["question"]), str(first["truth"])
        samples.append(ComparedSample(title, question, truth, answers, media.get((shard, key), [])))
    samples.sort(key=lambda sample: len({is_right for _, is_right in sample.answers}) == 1)  # stable
    return samples[:shown], len(samples)


def _predictions(folder: Path) -> dict[tuple[str, str, str, int], dict[str, Any]]:
    """Return the predictions of a run by file, shard, key and turn; lines that cannot be read are skipped."""
    entries = {}
    for file in sorted(folder.glob(_PATTERN)):
        with suppress(OSError), file.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                with suppress(ValueError, KeyError, TypeError):
                    entry = json.loads(line)
                    shard = str(entry["shard"]).replace("\\", "/").rpartition("/")[2]
                    needed = ("question", "truth", "answer", "exact_match")
                    entry = {name: entry[name] for name in (*needed, "key", "turn")}
                    entries[file.name, shard, str(entry["key"]), int(entry["turn"])] = entry
    return entries


def _images(runs: Sequence[ComparedRun]) -> dict[tuple[str, str], list[str]]:
    """Return the images of samples.json of all runs by shard and key."""
    images = {}
    for run in runs:
        for sample in held_out_samples(run.folder / "samples.json")[0]:
            if "key" in sample:
                images[str(sample["shard"]).rpartition("/")[2], str(sample["key"])] = sample["images"]
    return images


def ranking(
    runs: Sequence[ComparedRun], metric: str, mode: str
) -> list[tuple[ComparedRun, tuple[float, float] | None]]:
    """Return the runs with (step, best value) of a metric, the best run first, and those without a value last.

    Raises:
        UserError: no run has the metric.
    """
    if not any(metric in run.data for run in runs):
        names = ", ".join(metric_names(runs)) or "none"
        raise UserError(f"--metric: no run has {metric}. Their metrics are {names}")
    sign = 1 if mode == "min" else -1
    scored = [(run, run.best(metric, mode)) for run in runs]
    return sorted(scored, key=lambda pair: math.inf if pair[1] is None else sign * pair[1][1])


def write_comparison(path: Path, runs: Sequence[ComparedRun], metric: str = "", mode: str = "min") -> None:
    """Write the page; with a metric, runs are in the order of `ranking`. Raises OSError."""
    samples, total = compared_samples(runs)
    page = {
        "runs": [(run.name, str(run.folder), run.status, run.faults) for run in runs],
        "ranking": [(run.name, [_best(best)]) for run, best in ranking(runs, metric, mode)] if metric else [],
        "metric": metric,
        "differences": config_differences(runs),
        "charts": charts(runs),
        "tables": metric_tables(runs),
        "samples": samples,
        "total": total,
    }
    with replacing(path) as file:
        file.write(render(page, "compare.html.j2").encode(errors="replace"))


def _best(best: tuple[float, float] | None) -> str:
    return "" if best is None else f"{best[1]:,.6g} at step {best[0]:,.0f}"


def text_table(runs: Sequence[ComparedRun], metric: str = "", mode: str = "min") -> list[list[str]]:
    """Return rows of cells for a terminal: a run each, with its status, the keys that differ, and its last values."""
    ranked = ranking(runs, metric, mode) if metric else [(run, None) for run in runs]
    ordered = [run for run, _ in ranked]
    differences, last = config_differences(ordered), metric_tables(ordered)[-1].rows
    heads = ["run", *([f"best {metric}"] if metric else []), *(key for key, _ in differences[:_MOST_KEYS])]
    rows = [[*heads, *(name for name, _ in last), "status"]]
    for number, (run, best) in enumerate(ranked):
        cells = [run.name, *([_best(best)] if metric else [])]
        cells += [values[number][:_WIDTH] for _, values in differences[:_MOST_KEYS]]
        rows.append([*cells, *(values[number] for _, values in last), run.status])
    return rows


_MOST_KEYS, _WIDTH = 6, 24
"""Most keys that differ, and most characters of a value, in the table of a terminal."""
