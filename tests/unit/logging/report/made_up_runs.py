"""Made-up runs for the tests of the report."""

import base64

from mimo_train.logging.report.page import write_report
from mimo_train.logging.sinks.jsonl import JsonlSink
from tests.unit.logging.report.parsed_page import ParsedPage

PNG = base64.b64encode(
    base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")
).decode()
"""An image of one pixel."""


def write_metrics(run_dir, steps=40, evaluations=True, loss=lambda step: 5 / step):
    """metrics.jsonl of a run, evaluated every 20 steps."""
    sink = JsonlSink(run_dir / "metrics.jsonl", 0)
    for step in range(1, steps + 1):
        values = {"lm loss": loss(step), "grad_norm": 1.0, "learning_rate/images": 1e-3, "learning_rate/language": 2e-3}
        sink.log(step, 32 * step, values | {"tokens_per_second": 9000.0 + step, "step_seconds": 0.5})
        if evaluations and step % 20 == 0:
            values = {"eval/loss": 1 / step, "eval/exact_match": step / 50, "eval/samples": 512, "eval/recall": 0.25}
            sink.log(step, 32 * step, values)
    sink.close()


def report(run_dir, run) -> ParsedPage:
    """The report of `run`, in one piece and with nothing left beside it."""
    path = write_report(run_dir, run)
    assert path == run_dir / "report.html"
    assert not list(run_dir.glob(".*.tmp"))
    page = ParsedPage(path.read_text(encoding="utf-8"))
    assert not page.outside()
    return page
