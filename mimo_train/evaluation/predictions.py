"""Files of an evaluation for people: predictions of every sample, and media of samples for the report."""

import base64
import io
import json
import logging
import wave
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from data.pipeline import Samples
from data.storage.files import replacing
from data.text.tokens import Tokenizer

_logger = logging.getLogger(__name__)

FILE = "predictions.jsonl"
"""File in `run.dir` of the newest evaluation: a JSON object per learned turn, in the order of the samples. `prediction`
has the most likely token at each place of the true answer, given the true tokens before it. Up to the first wrong
token, greedy decoding writes the same."""


def predictions_of(microbatch: dict[str, Any], samples: int, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Yield an entry per learned turn of a microbatch with `losses` and `predicted`, for samples below `samples`."""
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
    """Write a line for each entry, with the step and its sample's shard and key. An error of the file is a warning."""
    lines = []
    for entry in sorted(entries, key=lambda entry: entry["number"]):
        shard, key = dataset.locate(entry["number"])
        lines.append(json.dumps({"step": step, "shard": str(shard), "key": key} | entry) + "\n")
    try:
        with replacing(path) as file:
            file.write("".join(lines).encode())
    except OSError as error:
        _logger.warning("%s cannot be written (%s): training continues without it", path, error)


SHOWN_SECONDS = 10
"""Longest audio clip in the report."""


def shown_media(
    dataset: Samples,
    number: int,
    media: Mapping[str, Sequence[torch.Tensor]] | None = None,
    seconds: int | None = SHOWN_SECONDS,
) -> dict[str, list[str]]:
    """Return base64 of a sample's PNG (`images`) and WAV (`clips`) files, as the first module of each kind gets them.

    Args:
        media: inputs of each module, if they have been read.
        seconds: length to cut audio to; None: keep all.
    """
    shown: dict[str, list[str]] = {"images": [], "clips": []}
    first = {item.kind: item.module for item in reversed(dataset.modules)}
    inputs = {module: media[module] if media else dataset.read_media(number, module)[0] for module in first.values()}
    if module := first.get("image"):
        shown["images"] = [_png(image) for image in inputs[module]]
    if module := first.get("audio"):
        sizes = dataset.input_sizes(number, module)
        clips = zip(inputs[module], sizes, strict=True)
        shown["clips"] = [_wav(clip[: seconds * rate] if seconds else clip, rate) for clip, (_, rate) in clips]
    return shown


def _png(image: torch.Tensor) -> str:
    """Encode uint8 or float32 [3, height, width], or the first of tiles [tiles, 3, height, width], as base64 PNG."""
    from PIL import Image

    buffer = io.BytesIO()
    image = image[0] if image.ndim == 4 else image
    if image.is_floating_point():
        image = image.round().clamp(0, 255).to(torch.uint8)
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def _wav(clip: torch.Tensor, rate: int) -> str:
    """Encode float32 [samples] in [-1, 1] as base64 of a 16-bit WAV file."""
    samples = (clip.clamp(-1, 1) * 32767).round().to(torch.int16)
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.numpy().tobytes())
    return base64.b64encode(buffer.getvalue()).decode()
