"""Jinja chat templates as Hugging Face tokenizers have them: compiled in a sandbox, rendered with generation blocks.

The environment is that of transformers 5.23.0 (utils/chat_template_utils.py), with two differences. Blocks are
kept per thread: transformers' tracker serves one rendering at a time, and the loader renders in several threads.
`strftime_now` gives one fixed day, because tokens that change at midnight would differ between ranks and after a
restart; a template that takes `date_string` can be given another.
"""

from __future__ import annotations

import datetime
import json
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

DAY = datetime.datetime(2024, 7, 26)
"""What `strftime_now` formats: the day that Llama 3.x templates take where there is no clock."""

_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class MisplacedMarker(TemplateError):
    """Assistant spans that are not where they were rendered."""


class _Spans(threading.local):
    """The rendering in progress of this thread."""

    length = 0
    """Characters so far, outside of the block that is being rendered."""
    found: list[tuple[int, str]] | None = None
    """(first character, text) of every generation block; None where nobody asks."""


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`: what the assistant writes."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_rendered"), [], [], body).set_lineno(line)

    def _rendered(self, caller: Any) -> str:
        text = caller()
        spans: _Spans = self.environment.spans  # type: ignore[attr-defined]
        if spans.found is not None:
            spans.found.append((spans.length, text))
        return text


class ChatJinja:
    """One compiled chat template. Raises jinja2.TemplateSyntaxError for one that is none."""

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self._spans = _Spans()
        environment.extend(spans=self._spans)
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = DAY.strftime
        self._template = environment.from_string(source)
        self.has_markers = bool(_MARKER.search(source))
        """Whether it says itself what the assistant writes."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any],
        *,
        prompt: bool = False,
    ) -> str:
        """The conversation as text; with `prompt` up to where the assistant's next answer begins. Raises whatever the
        template does."""
        return self._template.render(**_arguments(messages, tools, variables, prompt))

    def render_spans(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, variables: Mapping[str, Any]
    ) -> tuple[str, list[tuple[int, int]]]:
        """(text, first character and behind the last of every generation block).

        Raises:
            MisplacedMarker: a block is inside a macro or a variable, where its place in the text is not known.
        """
        spans, pieces = self._spans, []
        spans.length, spans.found = 0, []
        try:
            for piece in self._template.generate(**_arguments(messages, tools, variables, False)):
                pieces.append(piece)
                spans.length += len(piece)
            found = spans.found
        finally:
            spans.found = None
        text = "".join(pieces)
        for first, block in found:
            if not text.startswith(block, first):
                raise MisplacedMarker("a {% generation %} block is inside a macro or a variable: write it outside")
        return text, [(first, first + len(block)) for first, block in found]


def _arguments(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, variables: Mapping[str, Any], prompt: bool
) -> dict[str, Any]:
    # Names as transformers passes them; absent tools and documents are None.
    given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
    return {**given, **variables}


def _raise(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
