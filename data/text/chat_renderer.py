"""Render conversations as text with the Jinja chat template of a Hugging Face tokenizer.

Templates differ in contents (text or typed parts), roles and tools. Most do not reject other forms, but write a Python
list or drop them, so each is tried with known words.
"""

from __future__ import annotations

import datetime
import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import TemplateError, nodes

from data.errors import DataError, RecordError
from data.records.conversation import KINDS, Conversation, Part, Turn

DAY = datetime.datetime(2024, 7, 26)
"""The day for `strftime_now`, the default of Llama 3.x templates. Today's date would change tokens between ranks at
midnight and after a restart. Templates with `date_string` can be given another day."""

Messages = Sequence[Mapping[str, Any]]
_WORDS = {"system": "mimosystemwords", "user": "mimoquestion", "assistant": "mimoanswer"}
QUESTION = Turn("user", (Part("text", _WORDS["user"]),))
ANSWER = Turn("assistant", (Part("text", _WORDS["assistant"]),))
"""With QUESTION, a conversation to try a template with."""
_OTHER_TEMPLATE = "Set data.chat_template to a file with another template, or to own"


_ROLE, _NAME, _KEY, _VALUE, _TOOL = "mimorolewords", "mimofunction", "mimoargument", "mimovalue", "mimotool"
_QUESTION = {"role": "user", "content": _WORDS["user"]}
_ANSWER = {"role": "assistant", "content": _WORDS["assistant"]}
_SIMILAR = {"developer": "system", "function": "tool"}
"""Role -> the role to use if the template leaves the first out."""


def _calling(arguments: Any) -> dict[str, Any]:
    call = {"id": "call00001", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


class CompiledTemplate:
    """A Jinja chat template with its variables, and what it takes of tools and further roles. It is thread-safe."""

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        """Compile the template.

        Raises:
            jinja2.TemplateError: `source` is invalid, or has a generation block without a known position in the text.
        """
        from transformers.utils import chat_template_utils

        self._library, self._variables = chat_template_utils, dict(variables)
        self._template = chat_template_utils._cached_compile_jinja_template(source)
        environment = self._template.environment
        environment.globals["strftime_now"] = DAY.strftime
        self.has_blocks = _has_blocks(environment.parse(source))
        """True if {% generation %} blocks mark what the assistant writes."""
        self._lock = threading.Lock()  # the template object collects the blocks
        self._role = cache(self._try_role)
        self._arguments = cache(self._try_arguments)
        self._writes_tools = cache(self._try_tools)

    def render(
        self, messages: Messages, tools: Sequence[Any] | None = None, *, prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, with `prompt` up to the start of the next answer, and the first and end character of each
        generation block. Raises the template's errors."""
        messages = self._library._alias_reasoning_fields(messages)
        if not self.has_blocks:
            arguments = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
            return self._template.render(**arguments | self._variables), []
        with self._lock:
            return self._library._render_with_assistant_indices(
                self._template, messages, tools, None, prompt, **self._variables
            )

    def attempt(self, messages: Messages, tools: Sequence[Any] | None = None) -> str | None:
        """Return the text of messages; None if the template raises an error."""
        try:
            return self.render(messages, tools)[0]
        except Exception:  # a template may raise anything
            return None

    def fit(self, messages: Sequence[dict[str, Any]], has_tools: bool) -> list[dict[str, Any]]:
        """Return the messages as the template takes them. Raises RecordError if it would drop something."""
        if has_tools and not self._writes_tools():
            raise RecordError("the chat template leaves out the tools of the record")
        return [self._fit_message(message) for message in messages]

    def _fit_message(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["role"] in ("developer", "tool", "function"):
            return message | {"role": self._role(message["role"])}
        if message.get("function_call"):
            raise RecordError("a message has function_call, the old form of tool_calls. Write it as tool_calls")
        if not message.get("tool_calls"):
            return message
        calls = message["tool_calls"]
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise RecordError("tool_calls of a message is not a list of objects")
        return message | {"tool_calls": [self._fit_call(call) for call in calls]}

    def _fit_call(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return a call with arguments as an object or as JSON text, as the template takes them."""
        function = call.get("function")
        if isinstance(function, dict):
            return call | {"function": self._fit_call(function)}
        arguments, takes_object = call.get("arguments"), self._arguments() == "object"
        if isinstance(arguments, str) and takes_object:
            try:
                parsed = json.loads(arguments)
            except (ValueError, RecursionError):
                return call
            return call | {"arguments": parsed} if isinstance(parsed, dict) else call
        if isinstance(arguments, dict) and not takes_object:
            return call | {"arguments": json.dumps(arguments, ensure_ascii=False)}
        return call

    def _try_role(self, role: str) -> str:
        roles = [role, *([_SIMILAR[role]] if role in _SIMILAR else [])]
        written = [self._writes_role(candidate) for candidate in roles]
        for result in (True, None):  # None: rejected here, but a record may still render or get the template's error
            if result in written:
                return roles[written.index(result)]
        raise RecordError(f"the chat template leaves out messages of the role {role!r}")

    def _writes_role(self, role: str) -> bool | None:
        """True if the template writes such a message; None if it raises an error."""
        message = {"role": role, "content": _ROLE, "name": _NAME, "tool_call_id": "call00001"}
        if role in ("developer", "system"):
            text = self.attempt([message, _QUESTION, _ANSWER])
        else:
            text = self.attempt([_QUESTION, _calling({_KEY: _VALUE}), message, _ANSWER])
            text = self.attempt([_QUESTION, _ANSWER, message, _ANSWER]) if text is None else text
        return None if text is None else _ROLE in text

    def _try_arguments(self) -> str:
        """Return "object" or "text". Raises RecordError if the template leaves calls out."""
        forms = {"object": {_KEY: _VALUE}, "text": json.dumps({_KEY: _VALUE})}
        texts = {form: self.attempt([_QUESTION, _calling(arguments)]) for form, arguments in forms.items()}
        for form, text in texts.items():
            # Text dumped as JSON has escaped quotes; an object written as text has single quotes.
            if text is not None and _NAME in text and _KEY in text and not (f'\\"{_KEY}' in text or f"'{_KEY}" in text):
                return form
        if all(text is not None and _NAME not in text for text in texts.values()):
            raise RecordError("the chat template leaves out the tool_calls of a message")
        return "object"

    def _try_tools(self) -> bool:
        """True if the template writes tools or raises an error."""
        about = {"name": _TOOL, "description": "", "parameters": {"type": "object", "properties": {}}}
        text = self.attempt([_QUESTION, _ANSWER], [{"type": "function", "function": about}])
        return text is None or _TOOL in text


def _has_blocks(tree: nodes.Template) -> bool:
    """True if it has generation blocks. Raises TemplateError for nested ones, whose offsets transformers gets wrong."""

    def has_block(node: nodes.Node) -> bool:
        return any(isinstance(block.call.node, nodes.ExtensionAttribute) for block in node.find_all(nodes.CallBlock))

    if any(map(has_block, tree.find_all((nodes.Macro, nodes.AssignBlock, nodes.FilterBlock, nodes.CallBlock)))):
        raise TemplateError("a {% generation %} block is inside a macro or a variable. Write it outside")
    return has_block(tree)


@dataclass(frozen=True)
class Chat:
    """A conversation's messages as a template takes them."""

    template: CompiledTemplate
    messages: list[dict[str, Any]]
    tools: list[Any] | None

    def render(self, messages: Messages | None = None, *, prompt: bool = False) -> tuple[str, list[tuple[int, int]]]:
        """Return `CompiledTemplate.render` of `messages`, by default of all. Raises RecordError."""
        try:
            return self.template.render(self.messages if messages is None else messages, self.tools, prompt=prompt)
        except Exception as error:  # a template may raise anything
            reason = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
            raise RecordError(f"the chat template cannot render the record: {reason}") from error


class ChatRenderer:
    """Renders conversations with one or several named templates."""

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, Any], origin: str) -> None:
        """Compile the templates and try each.

        Args:
            sources: name -> template: `default`, and optionally `tool_use` for conversations with tools.
            variables: template variables besides the conversation, such as `bos_token`.
            origin: where the templates are from, for messages.

        Raises:
            DataError: a template is not Jinja, there is no default, or it does not render a question and an answer.
        """
        self.origin, self.sources = origin, dict(sources)
        if "default" not in sources:
            raise DataError(
                f"data.chat_template: {origin} has templates named {', '.join(sorted(sources))} and none named "
                "'default'. Set data.chat_template to a file with the one to use"
            )
        self._templates = {name: _compile(source, variables, origin) for name, source in sources.items()}
        self.identity = repr((sorted(sources.items()), sorted(variables.items(), key=str)))
        """Text that changes with everything that determines the rendered text."""
        self._forms = self._try_forms()
        self._written = {kind: self._try_part(kind) for kind in KINDS}

    def frame(self) -> str:
        """Return a user's message as the template writes it; empty if it rejects one alone."""
        return self._templates["default"].attempt([self._message(QUESTION, {})]) or ""

    def written(self, kind: str) -> str | None:
        """Return the template's text for a part of this kind; None if it has none."""
        return self._written[kind]

    def chat(self, conversation: Conversation, marks: Mapping[str, str]) -> Chat:
        """Return a conversation as the template takes it. `marks`: kind -> text of media it does not know.

        Raises RecordError if the template would leave something out.
        """
        name = "tool_use" if conversation.tools and "tool_use" in self._templates else "default"
        messages = [self._message(turn, marks) for turn in conversation.turns]
        template = self._templates[name]
        return Chat(template, template.fit(messages, bool(conversation.tools)), list(conversation.tools) or None)

    def _message(self, turn: Turn, marks: Mapping[str, str]) -> dict[str, Any]:
        content = {} if turn.typed is None else {"content": self._content(turn, marks)}
        return {"role": turn.role, **content, **turn.fields}

    def _content(self, turn: Turn, marks: Mapping[str, str]) -> str | list[dict[str, str]]:
        takes_text, takes_parts = self._forms.get(turn.role, self._forms["user"])
        media = [part.kind for part in turn.parts if part.kind != "text"]
        knows_media = bool(media) and all(self._written[kind] is not None for kind in media)
        if takes_text and not (takes_parts and (turn.typed or knows_media)):
            return "".join(part.text if part.kind == "text" else marks.get(part.kind, "") for part in turn.parts)
        return [
            {"type": part.kind}
            if part.kind != "text" and self._written[part.kind] is not None
            else {"type": "text", "text": part.text if part.kind == "text" else marks.get(part.kind, "")}
            for part in turn.parts
        ]

    def _try_forms(self) -> dict[str, tuple[bool, bool]]:
        """Return role -> (True if a content may be text, True if it may be a list of parts)."""
        choices = ({"user": user, "assistant": assistant} for user, assistant in ((0, 0), (1, 1), (1, 0), (0, 1)))
        base = next((forms for forms in choices if self._takes(forms)), None)
        if base is None:
            try:
                result = repr(self._templates["default"].render([_QUESTION, _ANSWER])[0])
            except Exception as error:  # a template may raise anything
                result = f"raises an error ({error})"
            raise DataError(
                f"data.chat_template: the template of {self.origin} does not write the words of a question and an "
                f"answer, but {result}. {_OTHER_TEMPLATE}"
            )
        forms = {role: (self._takes(base | {role: 0}), self._takes(base | {role: 1})) for role in base}
        # A template without a system role rejects both forms; a record with one then gets the template's error.
        system = (self._takes(base | {"system": 0}), self._takes(base | {"system": 1}))
        return forms | {"system": system if any(system) else forms["user"]}

    def _takes(self, forms: Mapping[str, int]) -> bool:
        """True if the template writes each word once, and no Python list."""
        messages = [
            {"role": role, "content": [{"type": "text", "text": words}] if forms[role] else words}
            for role, words in _WORDS.items()
            if role in forms
        ]
        text = self._templates["default"].attempt(messages)
        return text is not None and all(text.count(_WORDS[role]) == 1 for role in forms) and not _shows_list(text)

    def _try_part(self, kind: str) -> str | None:
        if not self._forms["user"][1]:
            return None
        words = {"type": "text", "text": _WORDS["user"]}
        without, with_part = (
            self._templates["default"].attempt([{"role": "user", "content": parts}])
            for parts in ([words], [{"type": kind}, words])
        )
        if without is None or with_part is None or _shows_list(with_part) or with_part.count(_WORDS["user"]) != 1:
            return None
        first = common_prefix(without, with_part)
        rest = common_prefix(without[first:][::-1], with_part[first:][::-1])
        begin, end = first, len(with_part) - rest
        # In `<image><bos>` the first character may be that of either tag: both are in the text.
        while first < end and begin and with_part[begin - 1] == with_part[end - 1 - first + begin]:
            begin -= 1
        return with_part[begin:end] or None


def common_prefix(*texts: str) -> int:
    """Return the length of the texts' common prefix."""
    return len(os.path.commonprefix(texts))


def _compile(source: str, variables: Mapping[str, Any], origin: str) -> CompiledTemplate:
    try:
        return CompiledTemplate(source, variables)
    except Exception as error:  # deeply nested blocks raise SyntaxError
        line = f"line {error.lineno}: " if hasattr(error, "lineno") else ""
        raise DataError(f"data.chat_template: the template of {origin} cannot be compiled: {line}{error}") from error


def _shows_list(text: str) -> bool:
    return "'type'" in text or '"type"' in text
