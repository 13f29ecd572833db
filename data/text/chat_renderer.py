"""A tokenizer's chat template as it wants to be fed: contents as text or as typed parts, the marks of media, tools.

Templates differ in what a message's content may be, and most do not say so when they get the other form: they write a
Python list, or leave the text out. So every template is tried once with a question and an answer of known words. What
it does of tools is tried when the first record has some (`data.tool_forms`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from jinja2 import TemplateError

from data.errors import DataError, RecordError
from data.records.conversation import Conversation, Part, Turn
from data.text.chat_jinja import ChatJinja
from data.text.tool_forms import ToolForms

_WORDS = {"system": "mimosystemwords", "user": "mimoquestion", "assistant": "mimoanswer"}
QUESTION = Turn("user", (Part("text", _WORDS["user"]),))
ANSWER = Turn("assistant", (Part("text", _WORDS["assistant"]),))
"""With QUESTION, a conversation to try a template with."""

_OTHER = "give a file with another template, or data.chat_template=own"
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of one field, the usual one first; transformers 5.23.0 gives a template all that templates read."""


class ChatRenderer:
    """Conversations as text by one or several named Jinja templates."""

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, Any], origin: str) -> None:
        """
        Args:
            sources: name -> template; `default`, and perhaps `tool_use` for conversations with tools.
            variables: what templates may use besides the conversation, such as `bos_token`.
            origin: for messages, whose template it is.

        Raises:
            DataError: a template is no Jinja, there is no default, or it does not render a question and an answer.
        """
        self.origin, self._variables, self.sources = origin, dict(variables), dict(sources)
        if "default" not in sources:
            raise DataError(
                f"data.chat_template: {origin} has templates named {', '.join(sorted(sources))} and none named "
                "'default': give a file with the one to use"
            )
        self._templates = {name: _compiled(source, origin) for name, source in sources.items()}
        self.identity = repr((sorted(sources.items()), sorted(self._variables.items(), key=str)))
        """Changes with whatever texts follow from."""
        self.has_markers = {name: template.has_markers for name, template in self._templates.items()}
        self._forms = self._tried_forms()
        self._written = {kind: self._tried_part(kind) for kind in ("image", "audio")}
        self._tool_forms = {
            name: ToolForms(partial(template.render, variables=self._variables))
            for name, template in self._templates.items()
        }

    def written(self, kind: str) -> str | None:
        """What the template writes for a part of this kind; None if it knows none."""
        return self._written[kind]

    def name_for(self, conversation: Conversation) -> str:
        """Which template a conversation takes."""
        return "tool_use" if conversation.tools and "tool_use" in self._templates else "default"

    def render(
        self, name: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, *, prompt: bool = False
    ) -> str:
        """The text of messages. Raises RecordError if the template cannot render them."""
        try:
            return self._templates[name].render(messages, tools, self._variables, prompt=prompt)
        except Exception as error:  # a template raises whatever its expressions do
            raise _unrenderable(error) from error

    def render_spans(
        self, name: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of messages, and of each generation block the first character and behind the last. Raises
        RecordError as `render` does."""
        try:
            return self._templates[name].render_spans(messages, tools, self._variables)
        except Exception as error:  # as above
            raise _unrenderable(error) from error

    def messages(
        self, name: str, turns: Sequence[Turn], tools: Sequence[Any], marks: Mapping[str, str]
    ) -> list[dict[str, Any]]:
        """Turns as the template `name` takes them.

        Args:
            tools: of the conversation.
            marks: kind -> text at the place of a medium, where the template does not know such parts.

        Raises:
            RecordError: the template leaves something of them out.
        """
        messages = [self._message(turn, marks) for turn in turns]
        return self._tool_forms[name].fitted(messages, bool(tools))

    def _message(self, turn: Turn, marks: Mapping[str, str]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": turn.role}
        if turn.typed is not None:
            message["content"] = self._content(turn, marks)
        if turn.fields:
            message |= turn.fields
            reasoning = next((turn.fields[name] for name in _REASONING if name in turn.fields), None)
            if reasoning is not None:
                message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        return message

    def _content(self, turn: Turn, marks: Mapping[str, str]) -> str | list[dict[str, str]]:
        as_text, as_parts = self._forms.get(turn.role, self._forms["user"])
        has_media = any(part.kind != "text" for part in turn.parts)
        if as_text and not (as_parts and (turn.typed or has_media and self._knows(turn))):
            return "".join(part.text if part.kind == "text" else marks[part.kind] for part in turn.parts)
        return [
            {"type": "text", "text": part.text}
            if part.kind == "text"
            else {"type": part.kind}
            if self._written[part.kind] is not None
            else {"type": "text", "text": marks[part.kind]}
            for part in turn.parts
        ]

    def _knows(self, turn: Turn) -> bool:
        """Whether it writes every medium of a turn itself."""
        return all(part.kind == "text" or self._written[part.kind] is not None for part in turn.parts)

    def _tried_forms(self) -> dict[str, tuple[bool, bool]]:
        """role -> whether a content may be text, and whether it may be a list of parts."""
        base = next(
            (
                forms
                for forms in ({"user": a, "assistant": b} for a, b in ((0, 0), (1, 1), (1, 0), (0, 1)))
                if self._carries(forms)
            ),
            None,
        )
        if base is None:
            try:
                said = repr(self._rendered({"user": 0, "assistant": 0}))
            except Exception as error:  # of a template, anything
                said = f"an error ({error})"
            raise DataError(
                f"data.chat_template: the template of {self.origin} does not write the words of a question and an "
                f"answer, but {said}: {_OTHER}"
            )
        forms = {role: (self._carries(base | {role: 0}), self._carries(base | {role: 1})) for role in base}
        # A template without a system role refuses each; a record with one is then refused by the template's own words.
        system = (self._carries(base | {"system": 0}), self._carries(base | {"system": 1}))
        return forms | {"system": system if any(system) else forms["user"]}

    def _rendered(self, forms: Mapping[str, int]) -> str:
        messages = [
            {"role": role, "content": [{"type": "text", "text": words}] if forms[role] else words}
            for role, words in _WORDS.items()
            if role in forms
        ]
        return self._templates["default"].render(messages, None, self._variables)

    def _carries(self, forms: Mapping[str, int]) -> bool:
        """Whether every word arrives, and no list was written as it stands."""
        try:
            text = self._rendered(forms)
        except Exception:  # of a template, anything
            return False
        return all(text.count(_WORDS[role]) == 1 for role in forms) and not _shows_list(text)

    def _tried_part(self, kind: str) -> str | None:
        """What stands in a user's turn because of a part of this kind."""
        if not self._forms["user"][1]:
            return None
        words = {"type": "text", "text": _WORDS["user"]}
        try:
            without, with_part = (
                self._templates["default"].render([{"role": "user", "content": parts}], None, self._variables)
                for parts in ([words], [{"type": kind}, words])
            )
        except Exception:  # of a template, anything
            return None
        if _shows_list(with_part) or with_part.count(_WORDS["user"]) != 1:
            return None
        first = common_prefix(without, with_part)
        rest = common_prefix(without[first:][::-1], with_part[first:][::-1])
        return with_part[first : len(with_part) - rest] or None


def common_prefix(one: str, other: str) -> int:
    """Characters that two texts share at their beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[:middle]):
            low = middle
        else:
            high = middle - 1
    return low


def _compiled(source: str, origin: str) -> ChatJinja:
    try:
        return ChatJinja(source)
    except Exception as error:  # as deeply nested blocks raise a SyntaxError of Python
        line = getattr(error, "lineno", "?")
        raise DataError(f"data.chat_template: the template of {origin} is no Jinja: line {line}: {error}") from error


def _shows_list(text: str) -> bool:
    return "'type'" in text or '"type"' in text


def _unrenderable(error: Exception) -> RecordError:
    said = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
    return RecordError(f"the chat template cannot render the record: {said}")
