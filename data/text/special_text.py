"""Special tokens of a vocabulary inside the texts of records: text, but for those that a run admits."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from data.errors import DataError
from data.records.conversation import Conversation, Part

GROUNDING = "grounding"
_GROUNDING = re.compile(
    r"<\|(?:object_ref|box|quad|point|polygon)_(?:start|end)\|>|<\|(?:begin|end)_of_box\|>|<\|/?(?:ref|det|grounding)\|>"
    r"|</?(?:ref|box|quad|point|polygon|phrase|object|grounding)>|<delimiter_of_multi_objects/>"
    r"|<(?:loc|seg)_?\d+>|<patch_index_\d+>"
)
"""Special tokens of boxes, points and references (Qwen-VL, InternVL, DeepSeek-VL2, GLM-V, PaliGemma, Kosmos-2, ...)."""
_STAND_INS = 0xF0000
"""First of the private characters that stand for special tokens while a chat template sees a record."""


class SpecialText:
    """Finds and hides special tokens in the texts of records."""

    def __init__(self, tokens: Iterable[str]) -> None:
        texts = sorted({text for text in tokens if text.strip()}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts))) if texts else None

    def found(self, conversation: Conversation) -> frozenset[str]:
        """Return the special tokens in the texts of a record."""
        tokens: set[str] = set()
        if pattern := self._pattern:
            _any_text(conversation, lambda text: tokens.update(pattern.findall(text)))
        return frozenset(tokens)

    def hidden(self, conversation: Conversation) -> tuple[Conversation, dict[str, str]]:
        """Return the conversation with a private character for every special token in its texts, and what each of these
        characters stands for."""
        pattern = self._pattern
        if pattern is None or not _any_text(conversation, pattern.search):
            return conversation, {}
        used: set[str] = set()
        _any_text(conversation, used.update)
        stand_ins: dict[str, str] = {}

        def hide(match: re.Match[str]) -> str:
            if match[0] not in stand_ins:
                free = next(char for at in range(0xFFFD) if (char := chr(_STAND_INS + at)) not in used)
                used.add(free)
                stand_ins[match[0]] = free
            return stand_ins[match[0]]

        hidden = _changed(conversation, lambda text: pattern.sub(hide, text))
        return hidden, {char: token for token, char in stand_ins.items()}


def admit(tokenizer: Any, given: str | Sequence[str], reserved: Collection[str]) -> tuple[str, ...]:
    """Make special tokens of a tokenizer of transformers tokens that a text may have.

    Args:
        given: `data.special_tokens_in_text`: tokens, or "grounding" for those of boxes, points and references.
        reserved: tokens that stand for media, which no text may have.

    Returns:
        Tokens that are admitted.

    Raises:
        DataError: a token is not in the vocabulary, or reserved; the tokenizer is not fast; it has none for grounding.
    """
    key = "data.special_tokens_in_text"
    added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
    tokens = [given] if isinstance(given, str) else [*given]
    if GROUNDING in tokens and GROUNDING not in added:
        known = sorted(token for token in added if _GROUNDING.fullmatch(token))
        if not known:
            raise DataError(f"{key}: data.tokenizer has no special tokens for grounding. List the tokens of your texts")
        tokens = [*(token for token in tokens if token != GROUNDING), *known]
    for token in tokens:
        if token not in added:
            raise DataError(f"{key}: {token!r} is not a special token of data.tokenizer. Remove it")
        if token in reserved:
            raise DataError(f"{key}: {token!r} stands for an image or a clip. Mark its place by <image> or <audio>")
    admitted = tuple(sorted({token for token in tokens if added[token]}))
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if admitted and backend is None:
        raise DataError(f"{key}: data.tokenizer is not a fast tokenizer. Save it as one (tokenizer.json)")
    if admitted:
        content = json.loads(backend.to_str())
        for token in content["added_tokens"]:
            token["special"] = token["special"] and token["content"] not in admitted
        tokenizer._tokenizer = type(backend).from_str(json.dumps(content))
    return admitted


def _any_text(conversation: Conversation, test: Any) -> bool:
    """True if `test` holds for a text of the record. It is called with each until then."""
    for turn in conversation.turns:
        for part in turn.parts:
            if part.text and test(part.text):
                return True
        if turn.fields and _any_of(turn.fields, test):
            return True
    return bool(conversation.tools) and _any_of(conversation.tools, test)


def _any_of(value: Any, test: Any) -> bool:
    if isinstance(value, str):
        return bool(test(value))
    if isinstance(value, Mapping):
        return any(_any_of(key, test) or _any_of(item, test) for key, item in value.items())
    return isinstance(value, list | tuple) and any(_any_of(item, test) for item in value)


def _changed(conversation: Conversation, change: Any) -> Conversation:
    turns = [
        replace(
            turn,
            parts=tuple(Part(part.kind, change(part.text)) for part in turn.parts),
            fields=_changed_in(turn.fields, change),
        )
        for turn in conversation.turns
    ]
    return Conversation(tuple(turns), tuple(_changed_in(conversation.tools, change)))


def _changed_in(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _changed_in(item, change) for key, item in value.items()}
    return [_changed_in(item, change) for item in value] if isinstance(value, list | tuple) else value
