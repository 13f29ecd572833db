"""Predictions of the language model on held-out samples at any layout, and their files for people.

Shape suffixes: B batch, S sequence, C positions of this context-parallel rank, V vocabulary part of this
tensor-parallel rank.
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
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from data.samples.media_spec import MediaInput
from data.samples.protocol import Samples
from data.storage.files import replacing
from data.text.tokens import Tokenizer
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.models.documents import documents_of
from mimo_train.models.language_model import choose_logits, spread
from mimo_train.models.parameters import modules_of
from mimo_train.parallel.context import gather_sequence, own_part
from mimo_train.training.step.forward_step import LEARNED, MODEL_INPUTS
from mimo_train.training.step.pipeline import Pipeline

_logger = logging.getLogger(__name__)


class PredictStep:
    """Forward step whose loss function returns `collect(microbatch, groups of the language model, output)`, by default
    `_predictions`; run with forward_only and collect_non_loss_data."""

    def __init__(self, pipeline: Pipeline, collect: Callable[..., Any] | None = None):
        self._collect = collect or _predictions
        self._groups = pipeline.groups.collections
        self._is_last_stage, self._is_alone = pipeline.is_last_stage, not pipeline.layout.edges

    def __call__(
        self, data_iterator: Iterator[dict[str, Any]], model: MegatronModule
    ) -> tuple[Any, Callable[..., dict[str, Any]] | None]:
        """Run one forward pass of this rank's modules over the next microbatch."""
        batch = next(data_iterator)
        inputs = {key: batch[key] for key in MODEL_INPUTS if key in batch and key not in ("labels", "loss_mask")}
        if LEARNED in batch:
            alone = unwrap_model(model)
            choose_logits(alone if self._is_alone else alone.language_model, batch[LEARNED])
        if self._is_alone:
            cp_group = self._groups[LANGUAGE].cp
            inputs.pop("documents", None)
            packing = {"packed_seq_params": documents_of(batch, cp_group.size())}
            output = model(**own_part(inputs, cp_group), attention_mask=None, **packing)
        else:
            inputs.setdefault("input_ids", None)
            output, _ = model(**inputs, labels=None, loss_mask=None)
        return output, partial(self._collect, batch, self._groups[LANGUAGE]) if self._is_last_stage else None


def _predictions(
    batch: dict[str, Any], language: ProcessGroupCollection, logits_BCV: torch.Tensor, non_loss_data: bool = True
) -> dict:
    """Return the microbatch with `losses` [B, S] in nats and `predicted` [B, S], the most likely next token. Every
    context-parallel rank gets the full sequence. With logits [1, N, V] at the places `learned`, both are 0
    elsewhere."""
    labels_BC = own_part({"labels": batch["labels"]}, language.cp)["labels"]
    shape, learned = labels_BC.shape, batch.get(LEARNED)
    if learned is not None:
        labels_BC = labels_BC.reshape(-1).index_select(0, learned).unsqueeze(0)
    logits_CBV = logits_BCV.transpose(0, 1).contiguous()
    predicted_CB = _parallel_argmax(logits_CBV, language.tp)
    losses_CB = vocab_parallel_cross_entropy(
        logits_CBV.float(), labels_BC.transpose(0, 1).contiguous(), tp_group=language.tp
    )
    if learned is not None:
        losses_CB, predicted_CB = (spread(part.squeeze(1), learned, shape).T for part in (losses_CB, predicted_CB))
    losses_SB, predicted_SB = (gather_sequence(part.contiguous(), language.cp) for part in (losses_CB, predicted_CB))
    return {**batch, "losses": losses_SB.transpose(0, 1), "predicted": predicted_SB.transpose(0, 1)}


def _parallel_argmax(logits_SBV: torch.Tensor, tp_group: dist.ProcessGroup) -> torch.Tensor:
    """Return the index of the largest logit over the full vocabulary, [S, B]; the lowest index among equals."""
    values, indices = logits_SBV.max(dim=-1)
    ranks = dist.get_world_size(tp_group)
    if ranks == 1:
        return indices
    indices = indices + dist.get_rank(tp_group) * logits_SBV.size(-1)
    all_values = [torch.empty_like(values) for _ in range(ranks)]
    all_indices = [torch.empty_like(indices) for _ in range(ranks)]
    dist.all_gather(all_values, values.contiguous(), group=tp_group)
    dist.all_gather(all_indices, indices.contiguous(), group=tp_group)
    best = torch.stack(all_values).argmax(dim=0, keepdim=True)
    return torch.stack(all_indices).gather(0, best).squeeze(0)


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
        text = isinstance(head, ColumnParallelLinear) and head.output_size == language.vocab_size
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


def shown_media(
    dataset: Samples,
    number: int,
    media: Mapping[str, Sequence[MediaInput]] | None = None,
    seconds: int | None = SHOWN_SECONDS,
) -> dict[str, list[str]]:
    """Return base64 of a sample's PNG (`images`) and WAV (`clips`) files, as the first module of each kind gets them;
    none of what a model's own processor makes.

    Args:
        media: inputs of each module, if they have been read.
        seconds: length to cut audio to; None: keep all.
    """
    shown: dict[str, list[str]] = {"images": [], "clips": []}
    first = {item.kind: item.module for item in reversed(dataset.modules)}
    inputs = {module: media[module] if media else dataset.read_media(number, module)[0] for module in first.values()}
    if module := first.get("image"):
        shown["images"] = [_png(image) for image in inputs[module] if isinstance(image, torch.Tensor)]
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
