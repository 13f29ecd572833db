"""report.html: one page about a run, in one file that opens anywhere.

Everything is inside: style, drawings, pictures. There is no script and nothing is fetched. Here the content is
gathered; templates/ places it.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from data.storage.files import replacing
from mimo_train.config.compose import to_yaml
from mimo_train.config.parts import LANGUAGE
from mimo_train.layout.run import Run
from mimo_train.logging.report.charts import Chart
from mimo_train.logging.report.curves import columns
from mimo_train.logging.report.evaluation_table import EvaluationTable, evaluation_table
from mimo_train.logging.report.headline import Number, headline
from mimo_train.logging.report.layout_drawing import LayoutDrawing, layout_drawing
from mimo_train.logging.report.render import render
from mimo_train.logging.report.run_charts import run_charts
from mimo_train.logging.report.shown_samples import ShownSamples, shown_samples
from mimo_train.logging.sinks.jsonl import iter_metrics


@dataclass(frozen=True)
class Page:
    """Contents of a report, in order; parts that a run does not have are None or empty."""

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
    """Write report.html of `run` into `run_dir`, from its metrics.jsonl and samples.json, as far as they exist.

    Returns:
        the path of the report; an older one is replaced in one step.

    Raises:
        UserError: a broken line in metrics.jsonl.
        OSError: the folder cannot be read or written.
    """
    path = run_dir / "report.html"
    # A name of undecodable bytes, or half of a character that a model wrote, must not cost the report.
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
