"""report.html: one page about a run in a self-contained file, without scripts.

This module gathers the content: style, drawings, images, and audio of held-out samples. templates/ lays it out.
"""

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from data.storage.files import replacing
from mimo_train.config.compose import to_yaml
from mimo_train.config.parts import LANGUAGE
from mimo_train.layout.run import Run
from mimo_train.logging.report.charts import Chart, columns
from mimo_train.logging.report.layout_drawing import LayoutDrawing, layout_drawing
from mimo_train.logging.report.run_summary import EvaluationTable, Number, evaluation_table, headline, run_charts
from mimo_train.logging.sinks.jsonl import iter_metrics

_FOLDER = Path(__file__).parent


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


def render(page: object, template: str = "page.html.j2", styles: Sequence[str] = ("style.css",)) -> str:
    """Return the whole page with its style sheets inside.

    Args:
        page: a `page.Page` for templates/page.html.j2, a `data_page.DataPage` for templates/data.html.j2.
    """
    style = "".join((_FOLDER / name).read_text(encoding="utf-8") for name in styles)
    return environment().get_template(template).render(page=page, style=style)


_SMALL_PIXELS = 128
"""Largest width of images that are enlarged without blurring."""

_SIGNATURES = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}
_WORDS = {"question": "Question", "answer": "Answer", "truth": "Truth"}


@dataclass(frozen=True)
class Image:
    """A PNG or JPEG in base64."""

    kind: str
    encoded: str
    small: bool


@dataclass(frozen=True)
class Sample:
    """One sample: `clips` are WAV in base64, `words` (label, text); `correct` is None if not judged."""

    images: list[Image]
    clips: list[str]
    words: list[tuple[str, str]]
    correct: bool | None

    @property
    def question(self) -> str:
        """Return the question, or an empty string."""
        return dict(self.words).get(_WORDS["question"], "")


@dataclass(frozen=True)
class ShownSamples:
    """The samples, or why they cannot be shown."""

    samples: list[Sample]
    fault: str = ""

    @property
    def judged(self) -> int:
        """Return the number of judged samples."""
        return sum(sample.correct is not None for sample in self.samples)

    @property
    def right(self) -> int:
        """Return the number of correct samples."""
        return sum(sample.correct is True for sample in self.samples)


def shown_samples(path: Path) -> ShownSamples | None:
    """Return the samples of `path` (samples.json); None if there are none.

    The file is a list of {"images": [base64 of a PNG or JPEG, ...], "clips": [base64 of a WAV, ...], "question",
    "answer", "truth", "correct": bool or null}. Items in other formats are left out.
    """
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, list) or not all(isinstance(sample, dict) for sample in found):
            raise ValueError("not a list of objects")
    except ValueError as error:
        return ShownSamples([], str(error))
    return ShownSamples([_sample(sample) for sample in found]) if found else None


def _sample(sample: dict[str, Any]) -> Sample:
    correct = sample.get("correct")
    return Sample(
        images=list(_images(sample.get("images") or [])),
        clips=[encoded for encoded in sample.get("clips") or [] if _decoded(encoded).startswith(b"RIFF")],
        words=[(label, str(sample[key])) for key, label in _WORDS.items() if sample.get(key) is not None],
        correct=None if correct is None else bool(correct),
    )


def _images(encoded_images: list[str]) -> Iterator[Image]:
    for encoded in encoded_images:
        content = _decoded(encoded)
        kind = next((kind for signature, kind in _SIGNATURES.items() if content.startswith(signature)), None)
        if kind is not None:
            # A PNG has its width in bytes 16 to 20 (PNG specification, IHDR chunk).
            small = kind == "image/png" and int.from_bytes(content[16:20], "big") <= _SMALL_PIXELS
            yield Image(kind, encoded, small)


def _decoded(encoded: str) -> bytes:
    try:
        return base64.b64decode(encoded, validate=True)
    except ValueError:
        return b""


@dataclass(frozen=True)
class Page:
    """Contents of a report, in order; missing parts are None or empty."""

    run: str
    models: dict[str, str]
    """Name of the encoder or language model of each module."""
    blind: bool
    headline: list[Number]
    charts: list[Chart]
    samples: ShownSamples | None
    evaluations: EvaluationTable | None
    layout: LayoutDrawing
    config: str
    written: str


def write_report(run_dir: Path, run: Run) -> Path:
    """Write report.html into `run_dir` from metrics.jsonl and samples.json, if they exist.

    Returns:
        Path of the report; it atomically replaces an older one.

    Raises:
        UserError: a broken line in metrics.jsonl.
        OSError: the folder cannot be read or written.
    """
    path = run_dir / "report.html"
    # Undecodable file names or characters cut in half by a model must not break the report.
    content = render(_gather(run_dir, run)).encode(errors="replace")
    with replacing(path) as file:
        file.write(content)
    return path


def _gather(run_dir: Path, run: Run) -> Page:
    cfg = run.cfg
    metrics = run_dir / "metrics.jsonl"
    data = columns(iter_metrics(metrics)) if metrics.exists() else {}
    encoders = {name: module.encoder.name for name, module in cfg.encoders.items()}
    return Page(
        run=run_dir.resolve().name,
        models=encoders | {LANGUAGE: cfg.llm.name},
        blind=cfg.data.blind,
        headline=headline(data, cfg.train.iters),
        charts=run_charts(data, run.layout),
        samples=shown_samples(run_dir / "samples.json"),
        evaluations=evaluation_table(data),
        layout=layout_drawing(run),
        config=to_yaml(cfg),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
