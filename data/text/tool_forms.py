"""What a chat template writes of tools and of the roles beside system, user and assistant.

A template that does not know a role, the calls of an assistant or the tools of a record mostly says nothing: it leaves
them out, or writes JSON inside JSON. So each is tried, once and only where a record has it, with known words.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from data.errors import RecordError

_ROLE, _NAME, _KEY, _VALUE, _TOOL = "mimorolewords", "mimofunction", "mimoargument", "mimovalue", "mimotool"
_FALLBACK = {"developer": "system", "function": "tool"}
"""Roles that stand for others: of a template that leaves the first out, the second is taken."""

_QUESTION = {"role": "user", "content": "mimoquestion"}
_ANSWER = {"role": "assistant", "content": "mimoanswer"}

Render = Callable[[list[dict[str, Any]], Any], str]
"""(messages, tools or None) -> text. Raises whatever the template does."""


class ToolForms:
    """How one template takes tools. What it refuses with an error of its own is left to that error."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._role = cache(self._tried_role)
        self._arguments = cache(self._tried_arguments)
        self._tools = cache(self._tried_tools)

    def fitted(self, messages: list[dict[str, Any]], has_tools: bool) -> list[dict[str, Any]]:
        """The messages as the template takes them.

        Raises:
            RecordError: it leaves out messages of a role, the calls of tools, or the tools themselves.
        """
        if has_tools and not self._tools():
            raise RecordError("the chat template leaves out the tools of the record")
        return [self._fitted(message) for message in messages]

    def _fitted(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["role"] in ("developer", "tool", "function"):
            return message | {"role": self._role(message["role"])}
        if message.get("function_call"):
            raise RecordError("a message has function_call, the old form of tool_calls: write it as tool_calls")
        if not message.get("tool_calls"):
            return message
        calls = message["tool_calls"]
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise RecordError("tool_calls of a message is not a list of objects")
        return message | {"tool_calls": [self._call(call) for call in calls]}

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        """A call with its arguments as the template takes them: as an object, or as that object in a text."""
        inner = call.get("function")
        if isinstance(inner, dict):
            return call | {"function": self._call(inner)}
        arguments, form = call.get("arguments"), self._arguments()
        if form == "object" and isinstance(arguments, str):
            try:
                parsed = json.loads(arguments)
            except (ValueError, RecursionError):
                return call
            return call | {"arguments": parsed} if isinstance(parsed, dict) else call
        if form == "text" and isinstance(arguments, dict):
            return call | {"arguments": json.dumps(arguments, ensure_ascii=False)}
        return call

    def _tried_role(self, role: str) -> str:
        """The role to give the template for messages of `role`."""
        wanted = [role, *([_FALLBACK[role]] if role in _FALLBACK else [])]
        found = [self._writes_role(one) for one in wanted]
        if True in found:
            return wanted[found.index(True)]
        if None in found:  # refused in the trial: a record may be what the template wants, or gets the same words
            return wanted[found.index(None)]
        raise RecordError(f"the chat template leaves out messages of the role {role!r}")

    def _writes_role(self, role: str) -> bool | None:
        """Whether the words of such a message arrive; None where the template raises an error."""
        said: dict[str, Any] = {"role": role, "content": _ROLE, "name": _NAME, "tool_call_id": "call00001"}
        messages: list[dict[str, Any]] = [said, _QUESTION, _ANSWER]
        if role not in ("developer", "system"):
            call = {"id": "call00001", "type": "function", "function": {"name": _NAME, "arguments": {_KEY: _VALUE}}}
            messages = [_QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}, said, _ANSWER]
        text = self._tried(messages)
        if text is None and role not in ("developer", "system"):
            text = self._tried([_QUESTION, _ANSWER, said, _ANSWER])
        return None if text is None else _ROLE in text

    def _tried_arguments(self) -> str:
        """ "object" or "text".

        Raises:
            RecordError: the template leaves calls out.
        """
        texts = {}
        for form, arguments in (("object", {_KEY: _VALUE}), ("text", json.dumps({_KEY: _VALUE}))):
            call = {"id": "call00001", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
            texts[form] = self._tried([_QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}])
        for form, text in texts.items():
            # A text that was written as JSON has its quotes escaped, an object that was written as text single ones.
            if text is not None and _NAME in text and _KEY in text and not (f'\\"{_KEY}' in text or f"'{_KEY}" in text):
                return form
        if all(text is not None and _NAME not in text for text in texts.values()):
            raise RecordError("the chat template leaves out the tool_calls of a message")
        return "object"

    def _tried_tools(self) -> bool:
        """Whether the tools of a record arrive, or the template raises an error."""
        about = {"name": _TOOL, "description": "", "parameters": {"type": "object", "properties": {}}}
        text = self._tried([_QUESTION, _ANSWER], [{"type": "function", "function": about}])
        return text is None or _TOOL in text

    def _tried(self, messages: Sequence[dict[str, Any]], tools: Any = None) -> str | None:
        try:
            return self._render(list(messages), tools)
        except Exception:  # of a template, anything
            return None
