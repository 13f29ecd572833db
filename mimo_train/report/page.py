"""report.html: one page about a run, in one file that opens anywhere. Imports no torch.

Everything is inline: style, drawings, pictures. There is no script and nothing is fetched.
"""

import math
import statistics
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from data.storage.replace import replacing
from mimo_train.config.compose import to_yaml
from mimo_train.config.schema import ConfigContainer
from mimo_train.metrics.console import duration
from mimo_train.metrics.sinks.jsonl import iter_metrics
from mimo_train.plan.layout import RunLayout
from mimo_train.report.charts import Series, chart
from mimo_train.report.curves import Column, columns, smooth
from mimo_train.report.layout_drawing import draw_layout, module_colors
from mimo_train.report.samples import samples_section
from mimo_train.report.style import STYLE

_RATE = "learning_rate/"
_LOSS_COLOR, _HELD_OUT_COLOR, _MATCH_COLOR, _NORM_COLOR, _SPEED_COLOR = 0, 3, 2, 4, 5
_MAX_ROWS = 50
"""Evaluations in the table."""


def write_report(run_dir: Path, cfg: ConfigContainer, layout: RunLayout) -> Path:
    """Write report.html of the run in `run_dir`, from its metrics.jsonl and samples.json, as far as they exist.

    Returns:
        the path of the report; an older one is replaced in one step.

    Raises:
        ValueError: a broken line in metrics.jsonl.
        OSError: the folder cannot be read or written.
    """
    metrics = run_dir / "metrics.jsonl"
    data = columns(iter_metrics(metrics)) if metrics.exists() else {}
    path = run_dir / "report.html"
    with replacing(path) as file:
        file.write(_page(run_dir, cfg, layout, data).encode())
    return path


def _page(run_dir: Path, cfg: ConfigContainer, layout: RunLayout, data: dict[str, Column]) -> str:
    name = escape(run_dir.resolve().name)
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    sections = [
        f"<header><h1>{name}</h1>{_subtitle(cfg)}</header>",
        _headline(cfg, data),
        _section("Curves", _curves(data, layout)),
        _section("Evaluations", _evaluations(data)),
        _section("Layout", draw_layout(layout)),
        _section("Held-out samples", samples_section(run_dir / "samples.json")),
        _section(
            "Configuration",
            f"<details><summary>config.yaml</summary><pre>{escape(to_yaml(cfg))}</pre></details>",
        ),
        f"<footer>Written by mimo-train on {written} from metrics.jsonl.</footer>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{name} - mimo-train</title><link rel="icon" href="data:,"><style>{STYLE}</style></head>'
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def _subtitle(cfg: ConfigContainer) -> str:
    models = [f"{name}: {module.encoder.name}" for name, module in cfg.encoders.items()]
    models.append(f"language: {cfg.language.llm.name}")
    blind = " Blind: media are replaced by zeros, only the text is left to learn from." if cfg.data.blind else ""
    return f'<p class="subtitle">{escape(", ".join(models))}.{blind}</p>'


def _headline(cfg: ConfigContainer, data: dict[str, Column]) -> str:
    """The numbers that a reader looks for first."""
    rows = [
        _held_out(data, "eval/exact_match", "Held-out exact match", lambda value: f"{value:.1%}"),
        _held_out(data, "eval/loss", "Held-out loss", lambda value: f"{value:.4f}"),
    ]
    if "consumed_samples" in data:
        steps = data["consumed_samples"].steps[-1]
        of = f" of {cfg.train.iters:,}" if steps < cfg.train.iters else ""
        rows.append(("Steps", f"{steps:,.0f}", of.strip()))
        rows.append(("Samples", f"{data['consumed_samples'].values[-1]:,.0f}", "seen in training"))
    speed = _finite(data.get("tokens_per_second"))
    if speed:
        rows.append(("Tokens per second", f"{statistics.median(speed):,.0f}", "median"))
    seconds = _finite(data.get("step_seconds"))
    if seconds:
        total = statistics.fmean(seconds) * data["step_seconds"].steps[-1]
        rows.append(("Training time", duration(total), f"{statistics.median(seconds):.3g} s per step, median"))
    cells = "".join(
        f"<div><dt>{label}</dt><dd>{escape(value)}{f'<small>{escape(more)}</small>' if more else ''}</dd></div>"
        for label, value, more in filter(None, rows)
    )
    return f'<dl class="headline">{cells}</dl>' if cells else '<p class="note">No metrics yet.</p>'


def _held_out(data: dict[str, Column], key: str, label: str, name) -> tuple[str, str, str] | None:
    last = data[key].last_finite() if key in data else None
    if last is None:
        return None
    step, value = last
    samples = data.get("eval/samples")
    count = f"{samples.values[-1]:,.0f} samples, " if samples else ""
    return label, name(value), f"{count}step {step:,.0f}"


def _curves(data: dict[str, Column], layout: RunLayout) -> str:
    if "consumed_samples" not in data:
        return ""
    last_step = data["consumed_samples"].steps[-1]
    match = data.get("eval/exact_match")
    figures = [
        chart("Loss", "cross-entropy, nats per token", _loss_series(data), last_step=last_step),
        chart(
            "Held-out exact match",
            "answers equal to the truth",
            [Series("exact match", match.steps, match.values, "dots", _MATCH_COLOR)] if match else [],
            last_step=last_step,
            y_range=(0, 1),
            y_format=lambda value: f"{value:.0%}" if value in (0, 1) else f"{100 * value:.3g}%",
        ),
        chart(
            "Gradient norm",
            "over all modules, before clipping",
            _raw_and_smooth(data.get("grad_norm"), "", _NORM_COLOR),
            last_step=last_step,
        ),
        chart("Learning rate", "per module", _rate_series(data, layout), last_step=last_step, name_single=True),
        chart(
            "Throughput",
            "tokens per second",
            _raw_and_smooth(data.get("tokens_per_second"), "", _SPEED_COLOR),
            last_step=last_step,
        ),
    ]
    drawn = "".join(figures)
    return f'<div class="charts">{drawn}</div>' if drawn else ""


def _loss_series(data: dict[str, Column]) -> list[Series]:
    series = _raw_and_smooth(data.get("lm loss"), "training, ", _LOSS_COLOR)
    if "eval/loss" in data:
        held_out = data["eval/loss"]
        series.append(Series("held-out", held_out.steps, held_out.values, "dots", _HELD_OUT_COLOR))
    return series


def _raw_and_smooth(column: Column | None, prefix: str, color: int) -> list[Series]:
    if column is None:
        return []
    smoothed = smooth(column.values, len(column.values) / 50)
    return [
        Series(f"{prefix}each step", column.steps, column.values, "raw", color),
        Series(f"{prefix}smoothed", column.steps, smoothed, "line", color),
    ]


def _rate_series(data: dict[str, Column], layout: RunLayout) -> list[Series]:
    """One curve for each module; modules with equal rates share one, or they would hide each other."""
    colors = module_colors(layout)
    groups: list[tuple[list[str], Column]] = []
    for key, column in data.items():
        if not key.startswith(_RATE):
            continue
        name = key.removeprefix(_RATE)
        same = next((names for names, other in groups if other == column), None)
        if same is None:
            groups.append(([name], column))
        else:
            same.append(name)
    return [
        Series(", ".join(names), column.steps, column.values, "line", colors.get(names[-1], 0))
        for names, column in groups
    ]


def _evaluations(data: dict[str, Column]) -> str:
    """A table of the evaluations: the held-out curves as numbers."""
    keys = [key for key in data if key.startswith("eval/")]
    steps = sorted({step for key in keys for step in data[key].steps})
    if not steps:
        return ""
    values = {key: dict(zip(data[key].steps, data[key].values, strict=True)) for key in keys}
    head = "".join(f'<th scope="col">{escape(key.removeprefix("eval/").replace("_", " "))}</th>' for key in keys)
    rows = "".join(
        f"<tr><td>{step:,.0f}</td>{''.join(f'<td>{_cell(key, values[key].get(step))}</td>' for key in keys)}</tr>"
        for step in steps[-_MAX_ROWS:]
    )
    cut = f'<p class="note">The last {_MAX_ROWS} of {len(steps):,}.</p>' if len(steps) > _MAX_ROWS else ""
    return (
        f'<div class="table"><table><thead><tr><th scope="col">step</th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{cut}"
    )


def _cell(key: str, value: float | None) -> str:
    if value is None:
        return ""
    if key == "eval/exact_match" and math.isfinite(value):
        return f"{value:.1%}"
    return f"{value:,.0f}" if value == int(value if math.isfinite(value) else 0) else f"{value:.4g}"


def _finite(column: Column | None) -> list[float]:
    return [value for value in column.values if math.isfinite(value)] if column else []
