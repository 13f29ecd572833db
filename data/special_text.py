"""Special tokens of a vocabulary inside the texts of records, where they must stay text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from data.conversation import Conversation, Part

_STAND_INS = 0xF0000
"""First of the private characters that stand for special tokens while a chat template sees a record."""


class SpecialText:
    """Finds and hides special tokens in the texts of records."""

    def __init__(self, tokens: Iterable[str]) -> None:
        texts = sorted({text for text in tokens if text.strip()}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts))) if texts else None

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
