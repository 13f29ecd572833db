"""Chat templates: conversation -> tokens, loss mask and prompt. `jinja_template.py` has those of Hugging Face.

Our own format is the same for every tokenizer:

    [begin] then for each turn: [role tag] text and placeholders [end of turn]

Learned are assistant turns with their end-of-turn token, and all of a plain text. Placeholders are never learned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from data.errors import RecordError
from data.records.conversation import MARKERS, Conversation
from data.text.placeholders import ItemText, Placeholder

MediaTokens = Mapping[str, Sequence[Sequence[tuple[int, ItemText]]]]
"""kind -> per member -> (placeholder id, text) of each module that takes this kind."""


@dataclass
class Encoded:
    """A conversation as tokens."""

    tokens: list[int]
    learned: list[bool]
    """True for targets of the loss."""
    media_end: int = 0
    """Position after the last placeholder; 0 without any."""
    answers: list[tuple[int, int]] = field(default_factory=list)
    """(position of the first learned token, index of the turn) of each learned turn."""

    def add(self, ids: Sequence[int], learned: bool) -> None:
        self.tokens.extend(ids)
        self.learned.extend([learned] * len(ids))


class Template(Protocol):
    """Turns conversations into tokens. Implementations are thread-safe."""

    name: str
    """Origin of the template, for messages."""
    is_own: bool
    """True for our own format."""
    notes: tuple[str, ...]
    """Notes for `mimo-train check`."""
    stop_ids: frozenset[int]
    """Tokens that end an answer."""
    identity: str
    """Text that changes with everything that determines the tokens, except the vocabulary."""

    def encode(self, conversation: Conversation, media: MediaTokens) -> Encoded:
        """Return the tokens of a conversation. Raises RecordError if it cannot be rendered."""

    def prompt(self, conversation: Conversation, media: MediaTokens) -> list[int]:
        """Return the tokens up to the start of the next answer. Raises RecordError as `encode` does."""


class Vocabulary(Protocol):
    """The part of a tokenizer that our own format uses."""

    begin_id: int | None
    end_of_turn_id: int

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text."""

    def role_ids(self, role: str) -> list[int]:
        """Return the ids that open a turn of `role`."""


def encode_plain(conversation: Conversation, vocabulary: Vocabulary) -> Encoded | None:
    """Return the tokens of a text without roles, which needs no template; None for a conversation."""
    if conversation.turns[0].role != "plain":
        return None
    encoded = Encoded([], [])
    encoded.add([] if vocabulary.begin_id is None else [vocabulary.begin_id], False)
    for number, turn in enumerate(conversation.turns):  # the common words of a pair are a turn without loss
        if turn.is_learned:
            encoded.answers.append((len(encoded.tokens), number))
        encoded.add(vocabulary.encode(turn.text), turn.is_learned)
    encoded.add([vocabulary.end_of_turn_id], True)
    return encoded


OWN = "our own"


class OwnTemplate:
    """Our own format, tokenized piece by piece: for bytes."""

    name, is_own = OWN, True
    notes: tuple[str, ...] = ()

    def __init__(
        self,
        vocabulary: Vocabulary,
        placeholders: Sequence[Placeholder] = (),
        around: Mapping[int, tuple[list[int], list[int]]] | None = None,
    ) -> None:
        """
        Args:
            around: pad id -> ids of its start and end, if any.
        """
        self._vocabulary = vocabulary
        self._around = {pad: pair for pad, pair in (around or {}).items() if any(pair)}
        self.stop_ids = frozenset([vocabulary.end_of_turn_id])
        self.identity = f"own {media_identity(placeholders)}"

    def encode(self, conversation: Conversation, media: MediaTokens) -> Encoded:
        """See `Template.encode`. Tools, tool calls and reasoning are rejected; a developer turn is a system turn."""
        plain = encode_plain(conversation, self._vocabulary)
        if plain is not None:
            return plain
        require_place(conversation)
        vocabulary, encoded = self._vocabulary, Encoded([], [])
        remaining = {kind: iter(members) for kind, members in media.items()}
        encoded.add([] if vocabulary.begin_id is None else [vocabulary.begin_id], False)
        for number, turn in enumerate(conversation.turns):
            encoded.add(vocabulary.role_ids("system" if turn.role == "developer" else turn.role), False)
            if turn.is_learned:
                encoded.answers.append((len(encoded.tokens), number))
            for part in turn.parts:
                if part.kind == "text":
                    encoded.add(vocabulary.encode(part.text), turn.is_learned)
                    continue
                for pad, item in next(remaining[part.kind]):
                    start, end = self._around.get(pad, ([], []))
                    encoded.add([*start, *vocabulary.encode(item.start), *item.tokens], False)
                    encoded.media_end = len(encoded.tokens)
                    encoded.add([*vocabulary.encode(item.end), *end], False)
            encoded.add([vocabulary.end_of_turn_id], turn.is_learned)
        return encoded

    def prompt(self, conversation: Conversation, media: MediaTokens) -> list[int]:
        """See `Template.prompt`."""
        return self.encode(conversation, media).tokens + self._vocabulary.role_ids("assistant")


_NO_PLACE = (
    "for which our own conversation format has no place. Use a tokenizer whose chat template has one, and "
    "data.chat_template=auto"
)
_TOOL_ROLES = ("tool", "function")
_CONTENT = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")


def require_place(conversation: Conversation) -> None:
    """Raise RecordError for content that our own format cannot express. Other fields, such as `name`, are ignored."""
    if conversation.tools:
        raise RecordError(f"the record has tools, {_NO_PLACE}")
    for turn in conversation.turns:
        for name in _CONTENT if turn.fields else ():
            if turn.fields.get(name):
                raise RecordError(f"a message has {name}, {_NO_PLACE}")
        if turn.role in _TOOL_ROLES:
            raise RecordError(f"the record has a message of the role {turn.role!r}, {_NO_PLACE}")


def media_identity(placeholders: Sequence[Placeholder]) -> str:
    """Return a text that changes with the tokens of media: the placeholders, and how markers are read."""
    return f"{list(placeholders)} without separators" if placeholders else "[]"


def own_chat_template(begin: str, roles: Mapping[str, str], end: str, places: Mapping[str, str]) -> str:
    """Return our own format as a Jinja template, for runs with a Hugging Face tokenizer and for exports.

    `roles`: role -> tag that opens its turns. `places`: kind -> text of an image or audio; it replaces markers too.
    """
    text = "message['content']"
    for marker, kind in MARKERS.items():
        if kind in places:
            text += "".join(
                f"|replace({_literal(line)}, {_literal(marker)})" for line in (f"\n{marker}", f"{marker}\n")
            )
            text += f"|replace({_literal(marker)}, {_literal(places[kind])})" if places[kind] != marker else ""
    parts = "".join(
        f"{{% elif part['type'] == '{kind}' %}}{{{{ {_literal(place)} }}}}" for kind, place in places.items()
    )
    content = (
        f"{{% if message['content'] is string %}}{{{{ {text} }}}}{{% else %}}{{% for part in message['content'] %}}"
        "{% if part['type'] == 'text' %}{{ part['text'] }}" + parts + "{% endif %}{% endfor %}{% endif %}"
    ) + f"{{{{ {_literal(end)} }}}}"
    opened = "".join(
        f"{{% {'elif' if at else 'if'} message['role'] == '{role}' %}}{{{{ {_literal(mark)} }}}}"
        for at, (role, mark) in enumerate(roles.items())
    )
    return (
        f"{{{{ {_literal(begin)} }}}}{{% for message in messages %}}{opened}"
        "{% else %}{{ raise_exception('no such role: ' + message['role']) }}{% endif %}"
        f"{{% if message['role'] == 'assistant' %}}{{% generation %}}{content}{{% endgeneration %}}"
        f"{{% else %}}{content}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {_literal(roles['assistant'])} }}}}{{% endif %}}"
    )


def _literal(text: str) -> str:
    """Quote a text for Jinja. Its escapes are those of JSON, except for surrogate pairs."""
    return json.dumps(text, ensure_ascii=False)
