"""Prompts of a JSONL file."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.records.conversation import KINDS, PART_KINDS, Part, Turn, split_markers
from data.records.records import ROLES
from mimo_train.config.errors import UserError
from mimo_train.evaluation.generation.prompts import Medium, Prompt, Prompts, user_turn


class PromptFile:
    """The prompts of a file. A line is an object with `prompt`, a text, or with `messages`, as in training records.
    `image`, `video` and `audio`, or their plurals, are paths of files, from the folder of the file."""

    def __init__(self, path: Path):
        """Raises UserError if the file cannot be read, or a line is no object with a prompt."""
        self._path = path
        try:
            self.raw = path.read_bytes()
            lines = self.raw.decode("utf-8-sig").split("\n")  # `splitlines` also splits within texts, at U+2028
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--prompts: cannot read {path}: {error}") from error
        self.records = [self._record(number, line) for number, line in enumerate(lines, 1) if line.strip()]
        if not self.records:
            raise UserError(f"--prompts: {path} has no prompts")

    def _record(self, number: int, line: str) -> tuple[int, dict[str, Any]]:
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError(f"--prompts: {self._path}, line {number}: is not JSON ({error})") from error
        if not isinstance(record, dict) or ("prompt" in record) == ("messages" in record):
            raise UserError(f"--prompts: {self._path}, line {number}: must be an object with prompt or messages")
        if not ("messages" in record or isinstance(record["prompt"], str)):
            raise UserError(f"--prompts: {self._path}, line {number}: prompt must be a text, or give messages")
        return number, record

    def prompt(self, at: int, prompts: Prompts, continues: bool) -> Prompt:
        """Return a prompt.

        Args:
            at: its index in `records`.
            continues: the model continues a prompt without media, instead of answering it as a user's turn.

        Raises:
            UserError: its media cannot be read, or do not match their places.
        """
        number, record = self.records[at]
        try:
            if record.get("tools"):
                raise UserError("tools are not supported here. Remove them")
            files = {kind: _paths(record, kind) for kind in KINDS}
            media = [self._medium(prompts, kind, file) for kind in KINDS for file in files[kind]]
            if "messages" in record:
                turns, media = self._turns(record["messages"], media, prompts)
            elif continues and not media and not record.get("system"):
                return prompts.of_text(_text(record["prompt"], "prompt"))
            else:
                turns = [user_turn(_text(record["prompt"], "prompt"), media)]
            if system := record.get("system"):
                turns.insert(0, Turn("system", (Part("text", _text(system, "system")),)))
            return prompts.of_conversation(turns, media)
        except (UserError, DataError) as error:
            raise UserError(f"--prompts: {self._path}, line {number}: {error}") from error

    def _medium(self, prompts: Prompts, kind: str, file: str) -> Medium:
        return prompts.medium(kind, self._path.parent / file.removeprefix("file://"))

    def _turns(self, messages: Any, media: list[Medium], prompts: Prompts) -> tuple[list[Turn], list[Medium]]:
        """Return messages as turns, and all media in the order of their places: those that the messages name, and the
        record's `media` at `<image>` and the like, or before the first user's text."""
        if not isinstance(messages, list) or not messages:
            raise UserError("messages must be a list of objects with role and content")
        turns, placed, left = [], list[Medium](), list(media)
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise UserError("messages must be a list of objects with role and content")
            content, parts = message.get("content") or "", list[Part]()
            for item in content if isinstance(content, list) else split_markers(_text(content, "content")):
                part, file = _part(item) if isinstance(item, Mapping) else (item, "")
                parts.append(part)
                if part.kind != "text":
                    placed.append(self._medium(prompts, part.kind, file) if file else _taken(left, part.kind))
            turns.append(Turn(_role(message), tuple(parts), _other_fields(message), typed=isinstance(content, list)))
        if turns[-1].role == "assistant":
            raise UserError("the last message is the assistant's, so that there is nothing to answer. Remove it")
        if left:
            at = next((at for at, turn in enumerate(turns) if turn.role == "user"), None)
            if at is None or any(medium.kind == each.kind for medium in placed for each in left):
                raise UserError(f"{len(left)} media have no place in the messages")
            turns[at] = replace(turns[at], parts=(*(Part(medium.kind) for medium in left), *turns[at].parts))
        return turns, [*left, *placed]


def _role(message: Mapping[str, Any]) -> str:
    role = ROLES.get(message["role"])
    if role is None:
        raise UserError(f"unknown role {message['role']!r}. Use one of {', '.join(ROLES)}")
    return role


def _other_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a message that only a chat template reads, such as tool calls."""
    return {name: value for name, value in message.items() if name not in ("role", "content") and value is not None}


def _part(item: Mapping[str, Any]) -> tuple[Part, str]:
    """Return a typed content part, and its file, "" if it names none."""
    name = item.get("type")
    if name == "text":
        return Part("text", _text(item.get("text"), "text")), ""
    if name not in PART_KINDS:
        raise UserError(f"content parts must have a type of text, {', '.join(PART_KINDS)}, got {name!r}")
    kind = PART_KINDS[name]
    value = next((item[key] for key in (name, kind, "path", "url") if item.get(key)), "")
    return Part(kind), _text(value.get("url") if isinstance(value, Mapping) else value, name)


def _paths(record: Mapping[str, Any], kind: str) -> list[str]:
    value = record.get(kind) or record.get(f"{kind}s") or []
    return [_text(path, kind) for path in (value if isinstance(value, list) else [value])]


def _taken(media: list[Medium], kind: str) -> Medium:
    medium = next((medium for medium in media if medium.kind == kind), None)
    if medium is None:
        raise UserError(f"the messages have more places of {kind}s than files")
    media.remove(medium)
    return medium


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{what} must be a text, got {value!r:.80}")
    return value
