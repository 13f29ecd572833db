"""Conversations -> tokens of a fixed length, with labels and loss mask; samples -> batches.

Shapes: B samples, S = sequence length. From the tokens t[0..L) of a conversation (template: see `tokens.py`),
input_ids[i] = t[i] and labels[i] = t[i + 1]: labels are the targets of their own position, shifted already. The loss
mask is 1 where the target is a token of an assistant turn or the end-of-turn that closes it, and 0 on everything else:
role markers, placeholders, other turns, padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from data.errors import RecordError
from data.records import Conversation, Turn
from data.tokens import Tokenizer

MediaTokens = Mapping[str, Sequence[Sequence[tuple[int, int]]]]
"""kind -> per member, in order -> (placeholder id, number of tokens) of each module that takes this kind."""


@dataclass(frozen=True)
class TextSample:
    """One sample as numbers. `length`: positions that are not padding."""

    number: int
    input_ids: np.ndarray  # int64 [S]
    labels: np.ndarray  # int64 [S]
    loss_mask: np.ndarray  # float32 [S]
    length: int
    question_and_truth: tuple[str, str] | None = None

    def without_loss(self) -> TextSample:
        return replace(self, loss_mask=np.zeros_like(self.loss_mask))


def encode(conversation: Conversation, tokenizer: Tokenizer, media: MediaTokens) -> tuple[list[int], list[bool], int]:
    """(tokens, whether each is a target of the loss, end of the last placeholder or 0)."""
    tokens: list[int] = []
    carries: list[bool] = []
    remaining = {kind: iter(members) for kind, members in media.items()}
    media_end = 0

    def add(ids: Sequence[int], carry: bool) -> None:
        tokens.extend(ids)
        carries.extend([carry] * len(ids))

    add([] if tokenizer.begin_id is None else [tokenizer.begin_id], False)
    for turn in conversation.turns:
        learns = turn.role in ("assistant", "plain")
        if turn.role != "plain":
            add(tokenizer.role_ids(turn.role), False)
        for part in turn.parts:
            if part.kind == "text":
                add(tokenizer.encode(part.text), learns)
                continue
            for placeholder, count in next(remaining[part.kind]):
                add([placeholder] * count, False)
            media_end = len(tokens)
        add([tokenizer.end_of_turn_id], learns)
    return tokens, carries, media_end


def encode_prompt(turns: Sequence[Turn], tokenizer: Tokenizer, media: MediaTokens) -> list[int]:
    """Tokens of `turns` and the marker that opens the assistant's answer: what a model continues from."""
    return encode(Conversation(tuple(turns)), tokenizer, media)[0] + tokenizer.role_ids("assistant")


def to_sample(
    conversation: Conversation, tokenizer: Tokenizer, media: MediaTokens, sequence_length: int, number: int, key: str
) -> TextSample:
    """The conversation cut or padded to `sequence_length`. Only text behind the last placeholder is ever cut.

    Raises RecordError if the media tokens do not all fit.
    """
    tokens, carries, media_end = encode(conversation, tokenizer, media)
    if media_end > sequence_length:
        raise RecordError(
            f"key {key!r}: the media tokens end at position {media_end}, but data.sequence_length is "
            f"{sequence_length}: needed {media_end}, given {sequence_length}. Raise data.sequence_length or use fewer "
            "tokens per picture"
        )
    length = min(len(tokens), sequence_length)
    input_ids = np.full(sequence_length, tokenizer.pad_id, dtype=np.int64)
    labels = np.full(sequence_length, tokenizer.pad_id, dtype=np.int64)
    loss_mask = np.zeros(sequence_length, dtype=np.float32)
    input_ids[:length] = tokens[:length]
    targets = tokens[1 : sequence_length + 1]
    labels[: len(targets)] = targets
    loss_mask[: len(targets)] = carries[1 : sequence_length + 1]
    return TextSample(number, input_ids, labels, loss_mask, length)


def stand_in(tokenizer: Tokenizer, media: MediaTokens, sequence_length: int, number: int) -> TextSample:
    """What takes the place of a bad sample: its placeholders, padding, and no loss at all."""
    ids = [token for kind in media.values() for member in kind for token, count in member for _ in range(count)]
    assert len(ids) <= sequence_length, (len(ids), sequence_length)
    input_ids = np.full(sequence_length, tokenizer.pad_id, dtype=np.int64)
    input_ids[: len(ids)] = ids
    labels = np.full(sequence_length, tokenizer.pad_id, dtype=np.int64)
    labels[: max(len(ids) - 1, 0)] = ids[1:]
    return TextSample(number, input_ids, labels, np.zeros(sequence_length, dtype=np.float32), len(ids))


def collate(samples: Sequence[TextSample]) -> dict[str, torch.Tensor]:
    """input_ids, labels, position_ids: int64 [B, S]; loss_mask: float32 [B, S]."""
    input_ids = torch.from_numpy(np.stack([sample.input_ids for sample in samples]))
    return {
        "input_ids": input_ids,
        "labels": torch.from_numpy(np.stack([sample.labels for sample in samples])),
        "loss_mask": torch.from_numpy(np.stack([sample.loss_mask for sample in samples])),
        "position_ids": torch.arange(input_ids.shape[1]).expand(len(samples), -1).contiguous(),
    }


def collate_media(items: Sequence[torch.Tensor | tuple[int, int]], name: str) -> dict[str, torch.Tensor | list] | None:
    """{name: [N, ...]} of N pictures or clips; a list of N if their shapes differ, or if these are only sizes; None if
    there are none."""
    if not items:
        return None
    tensors = [item for item in items if isinstance(item, torch.Tensor)]
    if tensors and all(tensor.shape == tensors[0].shape for tensor in tensors):
        return {name: torch.stack(tensors)}
    return {name: list(items)}
