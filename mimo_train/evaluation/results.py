"""Files of an evaluation: results.json, predictions.jsonl and report.html."""

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from data.storage.files import replacing
from mimo_train.evaluation.evaluate import Evaluated
from mimo_train.evaluation.predictions import shown_media
from mimo_train.logging.report.page import mark_small, render

RESULTS, PREDICTIONS, REPORT = "results.json", "predictions.jsonl", "report.html"


class Results:
    """Collects the evaluations of sets, and writes them.

    Attributes:
        values: metrics of all sets, by their keys in metrics.jsonl.
    """

    def __init__(self, facts: Mapping[str, Any], samples: int):
        """`facts` are what was evaluated and how, as JSON; `samples` of each set are shown in the report."""
        self.values: dict[str, float] = {}
        self._facts, self._samples = facts, samples
        self._sets: dict[str, Any] = {}
        self._lines: list[dict[str, Any]] = []
        self._cards: list[dict[str, Any]] = []

    def __str__(self) -> str:
        """Return the metrics, one in a line, and the sets of which samples were left out or answers cut."""
        lines = [f"{name:28} {value:.6g}" for name, value in self.values.items()]
        parts = [
            f"{key}: {of['measured']:,} of {of['samples']:,} samples were measured"
            for key, of in self._sets.items()
            if of["measured"] < of["samples"]
        ]
        parts += [
            f"{key}: {of['cut']:,} of {of['answers']:,} answers were cut" for key, of in self._sets.items() if of["cut"]
        ]
        return "\n".join([*lines, *parts])

    def add(self, key: str, evaluated: Evaluated) -> None:
        """Take the evaluation of the set with the label `key`."""
        dataset, lines = evaluated.dataset, evaluated.lines
        self.values |= evaluated.values
        self._sets[key] = {
            "fingerprint": dataset.fingerprint,
            "samples": len(dataset),
            "measured": int(next(value for name, value in evaluated.values.items() if name.endswith("samples"))),
            "answers": len(lines),
            "references": evaluated.references,
            "cut": evaluated.cut,
        }
        self._lines += [{"set": key} | line for line in lines]
        last_turns = {line["number"]: line for line in lines}
        for number, line in list(last_turns.items())[: self._samples]:
            right = line["prediction"].strip() in [text.strip() for text in line.get("references", [line["truth"]])]
            card = {"question": line["prompt"], "answer": line["prediction"], "correct": right}
            self._cards.append(shown_media(dataset, number) | card | {"truth": _joined(line)})

    def write(self, folder: Path, predictions: Path | None, seconds: float) -> None:
        """Write all files into a folder.

        Args:
            predictions: file of the predictions; None: predictions.jsonl in the folder.
            seconds: duration of the evaluation.

        Raises:
            OSError: a file cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        # JSON has no NaN and no infinity.
        metrics = {name: value if math.isfinite(value) else None for name, value in self.values.items()}
        result = {"metrics": metrics, "sets": self._sets, **self._facts}
        result |= {"seconds": round(seconds, 3), "written": written}
        _write(folder / RESULTS, json.dumps(result, indent=2) + "\n")
        _write(predictions or folder / PREDICTIONS, "".join(json.dumps(line) + "\n" for line in self._lines))
        page = {
            "title": str(self._facts["checkpoint"]),
            "values": [(name, "none" if value is None else f"{value:.6g}") for name, value in metrics.items()],
            "samples": mark_small(self._cards),
            "results": json.dumps(result, indent=2),
            "written": written,
        }
        _write(folder / REPORT, render(page, "evaluation.html.j2"))


def _joined(line: Mapping[str, Any]) -> str:
    references: Sequence[str] = line.get("references", [line["truth"]])
    return " | ".join(dict.fromkeys(references))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        # Undecodable file names or characters cut in half by a model must not break the files.
        file.write(text.encode(errors="replace"))
