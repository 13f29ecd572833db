"""Conversations -> tokens of a fixed length with labels and loss mask; samples -> batches.

Shapes: B samples, S = sequence length. From a conversation's tokens t[0..L) (see `templates.py`), input_ids[i] = t[i]
and labels[i] = t[i + 1]: labels are already shifted. The loss mask is 1 if the target is a token of an assistant turn
or its end-of-turn token, and 0 elsewhere: role tags, placeholders, other turns, padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from data.errors import RecordError
from data.order.step import TextSample
from data.records.conversation import Conversation
from data.samples.media_spec import MediaInput
from data.text.templates import MediaTokens
from data.text.tokens import Tokenizer
from data.text_format import Key


def to_sample(
    conversation: Conversation,
    tokenizer: Tokenizer,
    media: MediaTokens,
    sequence_length: int,
    number: int,
    key: Key,
    *,
    keep_text: bool = False,
) -> TextSample:
    """Return the conversation cut or padded to `sequence_length`. Only text after the last placeholder is cut.

    Raises RecordError if the media tokens do not fit, or the template cannot render the conversation.
    """
    encoded = tokenizer.template.encode(conversation, media)
    if (media_end := encoded.media_end) > sequence_length:
        raise RecordError(
            f"key {key!r}: the media tokens end at position {media_end}, but data.sequence_length is "
            f"{sequence_length}: needed {media_end}, given {sequence_length}. Raise data.sequence_length or use fewer "
            "tokens per image"
        )
    tokens, length = encoded.tokens, min(len(encoded.tokens), sequence_length)
    input_ids = np.full(sequence_length, tokenizer.pad_id, dtype=np.int64)
    labels = np.full(sequence_length, tokenizer.pad_id, dtype=np.int64)
    loss_mask = np.zeros(sequence_length, dtype=np.float32)
    input_ids[:length] = tokens[:length]
    targets = tokens[1 : sequence_length + 1]
    labels[: len(targets)] = targets
    loss_mask[: len(targets)] = encoded.learned[1 : sequence_length + 1]
    questions = None
    if keep_text:
        questions = tuple((max(at - 1, 0), conversation.question_before(turn)) for at, turn in encoded.answers)
    return TextSample(number, input_ids, labels, loss_mask, length, questions=questions)


def stand_in(tokenizer: Tokenizer, media: MediaTokens, sequence_length: int, number: int) -> TextSample:
    """Return the replacement of a bad sample: its placeholders and padding, without loss."""
    items = [item for of_kind in media.values() for member in of_kind for item in member]
    ids = [token for _, text in items for token in text.tokens if token in tokenizer.placeholder_ids]
    assert len(ids) <= sequence_length, (len(ids), sequence_length)
    input_ids = np.full(sequence_length, tokenizer.pad_id, dtype=np.int64)
    input_ids[: len(ids)] = ids
    labels = np.full(sequence_length, tokenizer.pad_id, dtype=np.int64)
    labels[: max(len(ids) - 1, 0)] = ids[1:]
    return TextSample(number, input_ids, labels, np.zeros(sequence_length, dtype=np.float32), len(ids))


def collate(samples: Sequence[TextSample], length: int | None = None) -> dict[str, Any]:
    """Return input_ids, labels, position_ids: int64 [B, S] (M-RoPE positions: [3, B, S]); loss_mask: float32 [B, S];
    lengths: tokens of each row, without padding; `blocks`: int64 [B, S], if any sample has them.

    Args:
        length: S, at least that of the longest sample; None: the samples' full size.
    """
    assert length is None or length >= max(sample.length for sample in samples), (length, samples)
    input_ids = torch.from_numpy(np.stack([sample.input_ids[:length] for sample in samples]))
    on_axes = [sample.positions[:, :length] for sample in samples if sample.positions is not None]
    assert len(on_axes) in (0, len(samples)), "one tokenizer and model for all samples"
    blocks = {}
    if any(sample.blocks is not None for sample in samples):
        blocks["blocks"] = torch.from_numpy(np.stack([_blocks(sample)[:length] for sample in samples]))
    return {
        **blocks,
        "input_ids": input_ids,
        "labels": torch.from_numpy(np.stack([sample.labels[:length] for sample in samples])),
        "loss_mask": torch.from_numpy(np.stack([sample.loss_mask[:length] for sample in samples])),
        "position_ids": torch.from_numpy(np.stack(on_axes, axis=1))
        if on_axes
        else torch.arange(input_ids.shape[1]).expand(len(samples), -1).contiguous(),
        "lengths": tuple(sample.length for sample in samples),
    }


def collate_packed(
    samples: Sequence[TextSample], lengths: Sequence[int], row_length: int, pad_id: int
) -> dict[str, Any]:
    """Return one row of T = `row_length` positions: consecutive samples of their planned `lengths`, and padding.

    input_ids, labels, position_ids: int64 [1, T]; loss_mask: float32 [1, T]. Positions restart in each document; M-RoPE
    positions are [3, 1, T]. documents: their ends; padding is one more, at position 0. A document's last target is
    padding without loss, so that no document is learned from the one before. A shorter stand-in is padded. lengths:
    (tokens of all documents,). blocks: int64 [1, T], if any sample has them; their numbers restart in each sample.
    """
    on_axes = [sample.positions for sample in samples if sample.positions is not None]
    assert len(on_axes) in (0, len(samples)), "one tokenizer and model for all samples"
    axes = len(on_axes[0]) if on_axes else 1
    input_ids, labels = (np.full(row_length, pad_id, dtype=np.int64) for _ in range(2))
    loss_mask, positions = np.zeros(row_length, dtype=np.float32), np.zeros((axes, row_length), dtype=np.int64)
    blocks = np.full(row_length, -1, dtype=np.int64)
    ends, end = list[int](), 0
    for sample, length in zip(samples, lengths, strict=True):
        assert sample.length <= length, (sample.number, sample.length, length)
        begin, end = end, end + length
        input_ids[begin:end] = sample.input_ids[:length]
        labels[begin:end] = sample.labels[:length]
        loss_mask[begin:end] = sample.loss_mask[:length]
        blocks[begin:end] = _blocks(sample)[:length]
        of_sample = sample.documents or (length,)
        starts = np.repeat([0, *of_sample[:-1]], np.diff(of_sample, prepend=0))
        on_one = np.arange(length) - starts
        positions[:, begin:end] = on_one if sample.positions is None else sample.positions[:, :length]
        ends += [begin + end_in_sample for end_in_sample in of_sample]
    assert end <= row_length, (end, row_length)
    return {
        **({"blocks": torch.from_numpy(blocks)[None]} if (blocks >= 0).any() else {}),
        "input_ids": torch.from_numpy(input_ids)[None],
        "labels": torch.from_numpy(labels)[None],
        "loss_mask": torch.from_numpy(loss_mask)[None],
        "position_ids": torch.from_numpy(positions)[:, None] if on_axes else torch.from_numpy(positions),
        "lengths": (end,),
        "documents": (*ends, *([row_length] if end < row_length else [])),
    }


def _blocks(sample: TextSample) -> np.ndarray:
    return np.full(len(sample.input_ids), -1, dtype=np.int64) if sample.blocks is None else sample.blocks


def collate_media(items: Sequence[MediaInput | tuple[int, ...]], name: str) -> dict[str, torch.Tensor | list] | None:
    """Return {name: [N, ...]} of N media items, a list if shapes differ or these are no tensors; None if empty."""
    if not items:
        return None
    tensors = [item for item in items if isinstance(item, torch.Tensor)]
    if tensors and all(tensor.shape == tensors[0].shape for tensor in tensors):
        return {name: torch.stack(tensors)}
    return {name: list(items)}
