"""What the model predicted for every sample of an evaluation, as a file of the run."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from data.pipeline import Samples
from data.storage.files import replacing
from data.text.tokens import Tokenizer

_logger = logging.getLogger(__name__)

FILE = "predictions.jsonl"
"""File in `run.dir` of the newest evaluation: a JSON object for each learned turn, in the order of the samples. Its
`prediction` has the most likely token at each place of the true answer, given the true tokens before it: up to the
first wrong one, what greedy decoding writes."""


def predictions_of(microbatch: dict[str, Any], samples: int, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Return an entry for each learned turn of a microbatch, without samples beyond the held-out ones.

    Args:
        microbatch: with `losses` and `predicted`, see `evaluation.greedy`.
    """
    masks = microbatch["loss_mask"].cpu() > 0
    numbers = microbatch["sample_numbers"].tolist()
    columns = [microbatch[name].cpu() for name in ("predicted", "labels", "losses")]
    questions = microbatch.get("questions") or [[(0, "")]] * len(numbers)
    for row, (number, mask) in enumerate(zip(numbers, masks, strict=True)):
        if number >= samples:
            continue
        ends = [first for first, _ in questions[row]][1:] + [mask.numel()]
        for turn, ((first, question), end) in enumerate(zip(questions[row], ends, strict=False)):
            learned = mask[first:end]
            if not bool(learned.any()):
                continue  # cut by data.sequence_length
            predicted, labels, losses = (column[row][first:end][learned] for column in columns)
            yield {
                "number": number,
                "turn": turn,
                "question": question,
                "prediction": tokenizer.decode(predicted.tolist()).strip(),
                "truth": tokenizer.decode(labels.tolist()).strip(),
                "exact_match": bool(torch.equal(predicted, labels)),
                "loss": float(losses.double().mean()),
                "tokens": len(labels),
            }


def write_predictions(path: Path, entries: list[dict[str, Any]], step: int, dataset: Samples) -> None:
    """Write a line for each entry, with the step and the place of its sample. Where the file cannot be written, that is
    said: no run ends for it."""
    lines = []
    for entry in sorted(entries, key=lambda one: one["number"]):
        shard, key = dataset.locate(entry["number"])
        lines.append(json.dumps({"step": step, "shard": str(shard), "key": key} | entry) + "\n")
    try:
        with replacing(path) as file:
            file.write("".join(lines).encode())
    except OSError as error:
        _logger.warning("%s cannot be written (%s): training goes on without it", path, error)
