"""report.html: one page about a run in a self-contained file, without scripts.

This module gathers the content: numbers, drawings, images, and audio of held-out samples. templates/ lays it out.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from data.storage.files import replacing
from mimo_train.config.compose import to_yaml
from mimo_train.config.parts import LANGUAGE
from mimo_train.layout.run import Run
from mimo_train.logging.report.charts import columns
from mimo_train.logging.report.layout_drawing import layout_drawing
from mimo_train.logging.report.run_summary import evaluation_table, headline, run_charts
from mimo_train.logging.sinks.jsonl import iter_metrics

_FOLDER = Path(__file__).parent
_SMALL_PIXELS = 128
"""Largest width of images that are enlarged without blurring."""


def environment() -> Environment:
    """Return an environment that escapes all text and raises on undefined names."""
    return Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(page: Mapping[str, Any], template: str = "page.html.j2", styles: Sequence[str] = ("style.css",)) -> str:
    """Return the page with its style sheets inside; `page` holds the values that `template` reads."""
    style = "".join((_FOLDER / name).read_text(encoding="utf-8") for name in styles)
    return environment().get_template(template).render(page=page, style=style)


def held_out_samples(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Return the samples of samples.json, and why they cannot be read, or "".

    A sample is {"images": [base64 of a PNG, ...], "clips": [base64 of a WAV, ...], "question", "answer", "truth",
    "correct": bool or None}; "small" is added for each image.
    """
    try:
        samples = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        # A PNG has its width in bytes 16 to 20 (PNG specification, IHDR chunk).
        for sample in samples:
            widths = [base64.b64decode(image[:32], validate=True)[16:20] for image in sample["images"]]
            sample["small"] = [int.from_bytes(width, "big") <= _SMALL_PIXELS for width in widths]
    except (ValueError, TypeError, KeyError) as error:
        return [], f"{type(error).__name__}: {error}"
    return samples, ""


def write_report(run_dir: Path, run: Run) -> Path:
    """Write report.html into `run_dir` from metrics.jsonl and samples.json, if they exist.

    Returns:
        Path of the report; it atomically replaces an older one.

    Raises:
        UserError: a broken line in metrics.jsonl.
        OSError: the folder cannot be read or written.
    """
    cfg, path, metrics = run.cfg, run_dir / "report.html", run_dir / "metrics.jsonl"
    data = columns(iter_metrics(metrics)) if metrics.exists() else {}
    samples, fault = held_out_samples(run_dir / "samples.json")
    page = {
        "run": run_dir.resolve().name,
        "models": {name: module.encoder.name for name, module in cfg.encoders.items()} | {LANGUAGE: cfg.llm.name},
        "blind": cfg.data.blind,
        "headline": headline(data, cfg.train.iters),
        "charts": run_charts(data, run.layout),
        "samples": samples,
        "samples_fault": fault,
        "evaluations": evaluation_table(data),
        "layout": layout_drawing(run),
        "config": to_yaml(cfg),
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    with replacing(path) as file:
        # Undecodable file names or characters cut in half by a model must not break the report.
        file.write(render(page).encode(errors="replace"))
    return path
