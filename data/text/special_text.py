"""Special tokens in the texts of records: they stay text unless `data.special_tokens_in_text` admits them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from data.errors import DataError, RecordError
from data.records.conversation import Conversation, Part

GROUNDING = "grounding"
_GROUNDING = re.compile(
    r"<\|(?:object_ref|box|quad|point|polygon)_(?:start|end)\|>|<\|(?:begin|end)_of_box\|>|<\|/?(?:ref|det|grounding)\|>"
    r"|</?(?:ref|box|quad|point|polygon|phrase|object|grounding)>|<delimiter_of_multi_objects/>"
    r"|<(?:loc|seg)_?\d+>|<patch_index_\d+>"
)
"""Special tokens of boxes, points and references (Qwen-VL, InternVL, DeepSeek-VL2, GLM-V, PaliGemma, Kosmos-2, ...)."""
_FIRST_STAND_IN = 0xF0000
"""First private character that replaces a special token while a chat template renders a record."""


class SpecialText:
    """Finds and hides special tokens in the texts of records."""

    def __init__(self, tokens: Iterable[str]) -> None:
        texts = sorted({text for text in tokens if text.strip()}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")

    def find(self, conversation: Conversation) -> frozenset[str]:
        """Return the special tokens in the texts of a record."""
        return frozenset(token for text in _texts(conversation) for token in self._pattern.findall(text))

    def hide(self, conversation: Conversation) -> tuple[Conversation, dict[str, str]]:
        """Replace special tokens in texts by private characters. Return the conversation, and character -> token.

        Raises RecordError for a special token that is split over neighbouring text parts, which templates join.
        """
        for turn in conversation.turns:
            for is_text, run in groupby(turn.parts, lambda part: part.kind == "text"):
                texts = [part.text for part in run] if is_text else []
                inside = sum(len(self._pattern.findall(text)) for text in texts)
                if len(texts) > 1 and len(self._pattern.findall("".join(texts))) > inside:
                    raise RecordError("a special token is split over neighbouring text parts. Join these parts")
        tokens = sorted(self.find(conversation))
        if not tokens:
            return conversation, {}
        used = {char for text in _texts(conversation) for char in text}
        free = (char for at in range(0xFFFD) if (char := chr(_FIRST_STAND_IN + at)) not in used)
        stand_ins = dict(zip(tokens, free, strict=False))
        hidden = _map_texts(conversation, lambda text: self._pattern.sub(lambda match: stand_ins[match[0]], text))
        return hidden, {char: token for token, char in stand_ins.items()}


def admit(tokenizer: Any, tokens: str | Sequence[str], reserved: Collection[str]) -> tuple[str, ...]:
    """Make a transformers tokenizer read special tokens in texts, and return these tokens.

    Raises DataError if one is unknown or `reserved` for media, or the tokenizer lacks grounding tokens.

    Args:
        tokens: `data.special_tokens_in_text`: tokens, or "grounding" for those of boxes, points and references.
    """
    key = "data.special_tokens_in_text"
    added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
    tokens = [tokens] if isinstance(tokens, str) else [*tokens]
    if GROUNDING in tokens and GROUNDING not in added:
        grounding = sorted(token for token in added if _GROUNDING.fullmatch(token))
        if not grounding:
            raise DataError(f"{key}: data.tokenizer has no special tokens for grounding. List the tokens of your texts")
        tokens = [*(token for token in tokens if token != GROUNDING), *grounding]
    for token in tokens:
        if token not in added:
            raise DataError(f"{key}: {token!r} is not a special token of data.tokenizer. Remove it")
        if token in reserved:
            raise DataError(f"{key}: {token!r} stands for an image or audio. Mark its place by <image> or <audio>")
    admitted = tuple(sorted({token for token in tokens if added[token]}))
    if admitted:
        backend: Any = tokenizer.backend_tokenizer
        content = json.loads(backend.to_str())
        for token in content["added_tokens"]:
            token["special"] = token["special"] and token["content"] not in admitted
        tokenizer._tokenizer = type(backend).from_str(json.dumps(content))
    return admitted


def _texts(conversation: Conversation) -> Iterator[str]:
    for turn in conversation.turns:
        for part in turn.parts:
            if part.text:
                yield part.text
        if turn.fields:
            yield from _texts_in(turn.fields)
    yield from _texts_in(conversation.tools)


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in [*value, *value.values()] if isinstance(value, Mapping) else value:
            yield from _texts_in(item)


def _map_texts(conversation: Conversation, change: Callable[[str], str]) -> Conversation:
    turns = [
        replace(
            turn,
            parts=tuple(Part(part.kind, change(part.text)) for part in turn.parts),
            fields=_map_texts_in(turn.fields, change),
        )
        for turn in conversation.turns
    ]
    return Conversation(tuple(turns), tuple(_map_texts_in(conversation.tools, change)))


def _map_texts_in(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _map_texts_in(item, change) for key, item in value.items()}
    return [_map_texts_in(item, change) for item in value] if isinstance(value, list | tuple) else value
