"""Pages in self-contained files without scripts: report.html about a run, and samples as training reads them.

This module gathers the content: numbers, drawings, images, audio, and coloured text. templates/ lays it out.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
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
_BINS = 24
"""Most bars of a histogram."""


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

    A sample is {"images": [base64 of a PNG, ...], "clips": [base64 of a WAV, ...], "videos": [base64 of an
    MP4 or WebM, ...], "question", "answer", "truth", "correct": bool or None}; "small" is added for each image.
    """
    try:
        return mark_small(json.loads(path.read_text(encoding="utf-8")) if path.exists() else []), ""
    except (ValueError, TypeError, KeyError) as error:
        return [], f"{type(error).__name__}: {error}"


def mark_small(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add "small" to samples: for each image, True if it is enlarged without blurring. Returns them."""
    for sample in samples:
        # A PNG has its width in bytes 16 to 20 (PNG specification, IHDR chunk).
        widths = [base64.b64decode(image[:32], validate=True)[16:20] for image in sample["images"]]
        sample["small"] = [int.from_bytes(width, "big") <= _SMALL_PIXELS for width in widths]
    return samples


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


@dataclass(frozen=True)
class TokenRun:
    """Consecutive tokens of one kind."""

    text: str
    kind: str
    """"learned" (with loss), "given" (without), or "medium" (a placeholder)."""
    tokens: int


@dataclass(frozen=True)
class DecodedSample:
    """One decoded sample; a notebook shows it with images, audio, videos and colours.

    Attributes:
        place: shard and key.
        images: PNG files in base64.
        audio: WAV files in base64.
        videos: MP4 or WebM files in base64.
        learned: number of tokens with loss.
        bad: why the sample cannot be read; empty if it can.
    """

    number: int
    place: str
    images: Sequence[str]
    audio: Sequence[str]
    runs: Sequence[TokenRun]
    tokens: int
    learned: int
    bad: str = ""
    videos: Sequence[str] = ()

    def __str__(self) -> str:
        """Return the text, with learned tokens in [[double brackets]] and placeholders with their count."""
        forms = {"learned": "[[{0.text}]]", "given": "{0.text}", "medium": "{0.text} x {0.tokens} "}
        text = "".join(forms[run.kind].format(run) for run in self.runs)
        return f"{text}\nBad: {self.bad}" if self.bad else text

    def __repr__(self) -> str:
        return f"sample {self.number} ({self.place}), {self.tokens} tokens, {self.learned} learned:\n{self}"

    def _repr_html_(self) -> str:
        return render(vars(self), "notebook.html.j2", ())


def token_runs(
    ids: Sequence[int], learned: Sequence[bool], media: Collection[int], shown: Callable[[Iterable[int]], str]
) -> list[TokenRun]:
    """Return the tokens of a sample in runs.

    Args:
        learned: True for each token with loss.
        media: ids of placeholders.
        shown: returns ids as readable text.
    """

    def kind(at: int) -> tuple[str, int]:
        if ids[at] in media:
            return "medium", ids[at]
        return ("learned" if learned[at] else "given"), -1

    runs = []
    text_ids: list[int] = []
    for (name, _), group in groupby(range(len(ids)), key=kind):
        run = [ids[at] for at in group]
        if name == "medium":
            text_ids, text = [], shown(run[:1])
        else:
            # A tokenizer may drop the space before the first word that it decodes.
            before, text_ids = shown(text_ids), text_ids + run
            full_text = shown(text_ids)
            text = full_text.removeprefix(before) if full_text.startswith(before) else shown(run)
        runs.append(TokenRun(text, name, len(run)))
    return runs


def length_bins(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return a histogram of lengths in bins of equal width: (least, most, number of samples)."""
    if not lengths:
        return []
    low, high = min(lengths), max(lengths)
    width = math.ceil((high - low + 1) / _BINS)
    counts = Counter((length - low) // width for length in lengths)
    return [(start, start + width - 1, counts[at]) for at, start in enumerate(range(low, high + 1, width))]


def render_data(
    title: str, facts: Sequence[tuple[str, str]], lengths: Sequence[int], samples: Sequence[DecodedSample]
) -> str:
    """Return the page as HTML; `lengths` are tokens of samples for the histogram."""
    page = {"title": title, "facts": facts, "bins": length_bins(lengths), "samples": samples}
    return render(page, "data.html.j2", ("style.css", "data.css"))
