"""Predictions of the language model on held-out samples at any layout, and their files for people.

Shape suffixes: B batch, S sequence, C positions of this context-parallel rank.
"""

import base64
import io
import json
import logging
import wave
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from data.samples.bad_samples import BadSample
from data.samples.media_spec import MediaInput
from data.samples.originals import read_videos
from data.samples.protocol import Samples
from data.samples.shard_dataset import ShardDataset
from data.storage.files import replacing
from data.text.tokens import Tokenizer
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.models.documents import documents_of
from mimo_train.models.language_model import choose_logits
from mimo_train.models.output.layer import OutputLayer
from mimo_train.models.parameters import modules_of
from mimo_train.parallel.context import gather_sequence, own_part
from mimo_train.training.step.forward_step import LEARNED, MODEL_INPUTS
from mimo_train.training.step.pipeline import Pipeline

_logger = logging.getLogger(__name__)


class PredictStep:
    """Forward step whose loss function returns `collect(microbatch, groups of the language model, output)`: by default
    `_predictions` of losses and most likely tokens, else of the model without labels. Run with forward_only and
    collect_non_loss_data."""

    def __init__(self, pipeline: Pipeline, collect: Callable[..., Any] | None = None):
        self._collect, self._predicts = collect or _predictions, collect is None
        self._groups = pipeline.groups.collections
        self._is_last_stage, self._is_alone = pipeline.is_last_stage, not pipeline.layout.edges

    def __call__(
        self, data_iterator: Iterator[dict[str, Any]], model: MegatronModule
    ) -> tuple[Any, Callable[..., dict[str, Any]] | None]:
        """Run one forward pass of this rank's modules over the next microbatch."""
        batch = next(data_iterator)
        unused = () if self._predicts else ("labels", "loss_mask")
        inputs = {key: batch[key] for key in MODEL_INPUTS if key in batch and key not in unused}
        if LEARNED in batch or self._predicts:
            alone = unwrap_model(model)
            language = alone if self._is_alone else alone.language_model
            choose_logits(language, batch.get(LEARNED), predicts=self._predicts)
        if self._is_alone:
            cp_group = self._groups[LANGUAGE].cp
            inputs = {key: value for key, value in inputs.items() if key not in ("documents", "loss_mask")}
            packing = {"packed_seq_params": documents_of(batch, cp_group.size())}
            output = model(**own_part(inputs, cp_group), attention_mask=None, **packing)
        else:
            output, _ = model(**{"input_ids": None, "labels": None, "loss_mask": None} | inputs)
        return output, partial(self._collect, batch, self._groups[LANGUAGE]) if self._is_last_stage else None


def _predictions(
    batch: dict[str, Any], language: ProcessGroupCollection, output_2BC: torch.Tensor, non_loss_data: bool = True
) -> dict:
    """Return the microbatch with `losses` [B, S] in nats and `predicted` [B, S], the most likely next token, 0 where
    there are no logits. Every context-parallel rank gets the full sequence."""
    losses_BS, predicted_BS = (
        gather_sequence(part_BC.T.contiguous(), language.cp).transpose(0, 1) for part_BC in output_2BC
    )
    return {**batch, "losses": losses_BS, "predicted": predicted_BS.long()}


def no_text(cfg: ConfigContainer) -> str:
    """Return why no answers are predicted, where `predicts_text` is False."""
    if cfg.traits.form == "labels":
        return f"records of train.task={cfg.train.task} may have undesirable answers, which are not predicted"
    return "the model ends in a head of its own, and no logits of the vocabulary"


def predicts_text(cfg: ConfigContainer, pipeline: Pipeline) -> bool:
    """True if answers are predicted: they are right ones, and the language model ends in logits of the vocabulary; a
    value head does not. Collective over all ranks."""
    other_head = False
    if pipeline.is_last_stage:
        language = unwrap_model(modules_of(pipeline.model)[LANGUAGE][-1])
        head = getattr(language, "output_layer", None)  # a class of transformers has its own
        text = isinstance(head, OutputLayer)
        other_head = head is not None and not text
    ranks = torch.tensor(int(other_head), device=pipeline.device)
    dist.all_reduce(ranks)
    return int(ranks) == 0 and cfg.traits.form != "labels"


FILE = "predictions.jsonl"
"""File in `run.dir` of the newest evaluation: a JSON object per learned turn, in the order of the samples. `prediction`
has the most likely token at each place of the true answer, given the true tokens before it; `answer` is its part up to
the first wrong token, which greedy decoding writes too; with metrics of generated answers, it is the generated one."""


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
            wrong = (predicted != labels).nonzero().flatten().tolist()
            greedy = predicted[: wrong[0] + 1 if wrong else None].tolist()
            is_cut = bool(wrong) and greedy[-1] not in tokenizer.template.stop_ids
            yield {
                "number": number,
                "turn": turn,
                "question": question,
                "prediction": tokenizer.decode(predicted.tolist()).strip(),
                "answer": tokenizer.decode(greedy).strip() + (" ..." if is_cut else ""),
                "truth": tokenizer.decode(labels.tolist()).strip(),
                "exact_match": not wrong,
                "loss": float(losses.double().mean()),
                "tokens": len(labels),
            }


def write_predictions(path: Path, entries: list[dict[str, Any]], step: int, dataset: Samples) -> None:
    """Write a line for each entry, with the step and its sample's shard and key."""
    lines = []
    for entry in entries:
        shard, key = dataset.locate(entry["number"])
        lines.append(json.dumps({"step": step, "shard": str(shard), "key": key} | entry) + "\n")
    _write(path, "".join(lines))


def write_samples(path: Path, entries: list[dict[str, Any]], samples: int, dataset: Samples) -> None:
    """Write the last turn of the first `samples` samples with their media, for the report, trackers and `compare`."""
    last_turns = list({entry["number"]: entry for entry in entries}.values())[:samples]
    words = {"question": "question", "answer": "answer", "truth": "truth", "correct": "exact_match"}
    shown: list[dict[str, Any]] = []
    for entry in last_turns:
        shard, key = dataset.locate(entry["number"])
        place = {"shard": str(shard), "key": key}
        shown.append(place | shown_media(dataset, entry["number"]) | {word: entry[of] for word, of in words.items()})
    _write(path, json.dumps(shown))


def _write(path: Path, text: str) -> None:
    """Write a file; an error is a warning, because a run does not end for it."""
    try:
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        _logger.warning("%s cannot be written (%s): training continues without it", path, error)


SHOWN_SECONDS = 10
"""Longest audio clip in the report."""
SHOWN_FRAMES = 32
"""Most frames of a sample's videos in the report."""
SHOWN_VIDEO_BYTES = 1 << 18
"""Most bytes of a sample's videos in the report; the frames of larger ones are shown alone."""


def shown_media(
    dataset: Samples,
    number: int,
    media: Mapping[str, Sequence[MediaInput]] | None = None,
    seconds: int | None = SHOWN_SECONDS,
) -> dict[str, list[str]]:
    """Return base64 of a sample's PNG (`images`) and WAV (`clips`) files, as the first module of each kind gets them;
    none of what a model's own processor makes. Its small video files (`videos`) come next to their frames.

    Args:
        media: inputs of each module, if they have been read.
        seconds: length to cut audio to; None: keep all.
    """
    shown: dict[str, list[str]] = {"images": [], "clips": [], "videos": []}
    first = {item.kind: item.module for item in reversed(dataset.modules)}
    inputs: dict[str, Sequence[MediaInput]] = {}
    bad: BadSample | None = None
    for name in first.values():
        inputs[name], bad_media = (media[name], None) if media else dataset.read_media(number, name)
        bad = bad or bad_media
    if module := first.get("image"):
        images = [image for image in inputs[module] if isinstance(image, torch.Tensor)]
        if bad is None and isinstance(dataset, ShardDataset):
            videos = read_videos(dataset, number, SHOWN_VIDEO_BYTES)
            shown["videos"] = [base64.b64encode(video).decode() for video in videos]
            images = images[:SHOWN_FRAMES] if dataset.meta(number).counts.get("video") else images
        shown["images"] = [_png(image) for image in images]
    if module := first.get("audio"):
        sizes = dataset.input_sizes(number, module)
        clips = zip(inputs[module], sizes, strict=True)
        shown["clips"] = [
            _wav(clip[: seconds * rate] if seconds else clip, rate)
            for clip, (_, rate) in clips
            if isinstance(clip, torch.Tensor)
        ]
    return shown


def _png(image: torch.Tensor) -> str:
    """Encode uint8 or float32 [3, height, width] as base64 PNG: the first of tiles [tiles, 3, height, width], the first
    frame of a pair of a video [6, height, width]."""
    from PIL import Image

    buffer = io.BytesIO()
    image = (image[0] if image.ndim == 4 else image)[:3]
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
