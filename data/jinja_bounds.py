"""A sandbox of Jinja in which every rendering ends: a chat template comes with a tokenizer, from whoever made that.

What a rendering does is counted: turns of loops, calls, and the size of what goes in and comes out. It is not timed:
all ranks, and a run that is started again, must come to the same verdict about a sample. Jinja's own sandbox bounds the
length of one `range`, not loops inside of loops, macros that call themselves, or texts that double.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from jinja2 import TemplateError, nodes, pass_context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

WORK = 1_000_000
"""What a rendering may do: turns, calls, elements of lists, and 64 characters each. A conversation of a thousand turns
takes a fiftieth."""
_CHARACTERS = 64
_LARGEST = 1_000_000  # width, number of parts, copies
_BITS = 4096  # of a whole number
_TURNS, _MADE, _WRITTEN = "turns of a loop", "made", "written"  # no template can call a filter of these names
_PADS = ("center", "ljust", "rjust", "zfill", "expandtabs")
_SIZED = frozenset({"batch", "center", "indent", "slice", "tojson"})
"""Filters of which a number says how much they make."""
_WIDE = re.compile(r"\d{7}|%[^a-zA-Z%]*\*|\{[^{}]*:[^{}]*\{")
"""In a format: a width of millions, or one that is given as an argument."""


class EndlessTemplate(TemplateError):
    """A rendering has done more than any conversation needs."""

    def __init__(self, what: str = ""):
        super().__init__(f"the template is given up: {what or f'its loops and calls do not end within {WORK:,} turns'}")


class _Work(threading.local):
    """Of the rendering in progress of this thread."""

    left = 0


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """See the module. `begin` comes before each rendering, `bound` after the last filter was added."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=self._finalized, **options)
        self._work = _Work()
        # As long as its argument says, and another text each time.
        del self.globals["lipsum"]

    def bound(self) -> None:
        """Count what filters do. Before a template is compiled: no work is allowed then, so that nothing is computed
        beforehand, uncounted."""
        self.filters = {name: self._counted(name, function) for name, function in self.filters.items()}
        self.filters |= {_TURNS: self._turns, _MADE: self._made, _WRITTEN: self._written}

    def begin(self) -> None:
        """A rendering begins in this thread."""
        self._work.left = WORK

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # Named as in Jinja: keywords of a template's macro may have any other name.
        __self._spend(1 + sum(map(_size, args)) + sum(map(_size, kwargs.values())))
        # Jinja wraps `str.format` in a function of its own.
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str):
            _require_small(owner, getattr(__obj, "__name__", ""), args)
        made = super().call(__context, __obj, *args, **kwargs)
        __self._spend(_size(made))
        return made

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Of the intercepted operators."""
        if operator == "*":
            copies = next((one for one in (left, right) if isinstance(one, int)), 0)
            if isinstance(left, int) and isinstance(right, int):
                _require(left.bit_length() + right.bit_length() <= _BITS, "a number is too large")
            elif hasattr(left, "__len__") or hasattr(right, "__len__"):
                length = len(left) if hasattr(left, "__len__") else len(right)
                _require(length * copies <= _CHARACTERS * WORK, "it repeats a text too often")
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _require(left.bit_length() * max(right, 1) <= _BITS, "a number is too large")
        elif operator == "%" and isinstance(left, str):
            _require(not _WIDE.search(left), "a format is too wide")
        made = super().call_binop(context, operator, left, right)
        self._spend(1 + _size(made))
        return made

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        found = _Counting().visit(super()._parse(source, name, filename))
        assert isinstance(found, nodes.Template)
        found.set_environment(self)
        return found

    def _spend(self, amount: int) -> None:
        self._work.left -= amount
        if self._work.left < 0:
            raise EndlessTemplate()

    @pass_context
    def _turns(self, _context: Any, values: Iterable[Any]) -> Iterator[Any]:
        """The values that a loop goes over."""
        work = self._work
        for value in values:
            work.left -= 1
            if work.left < 0:
                raise EndlessTemplate()
            yield value

    @pass_context
    def _made(self, _context: Any, value: Any) -> Any:
        self._spend(_size(value))
        return value

    @pass_context
    def _written(self, _context: Any, characters: int) -> str:
        self._spend(1 + characters // _CHARACTERS)
        return ""

    def _finalized(self, value: Any) -> Any:
        """A value that is about to be written."""
        work = self._work
        work.left -= 1 + (len(value) // _CHARACTERS if isinstance(value, str) else _size(value))
        if work.left < 0:
            raise EndlessTemplate()
        return value

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # with its marks, such as that it takes the context
        def counted(*args: Any, **kwargs: Any) -> Any:
            numbers = [*args, *kwargs.values()] if name in _SIZED else ()
            large = any(isinstance(one, int) and abs(one) > _LARGEST for one in numbers[1:])
            _require(not large, f"a number given to {name} is too large")
            texts = [one for one in args if isinstance(one, str)]
            if texts and name in ("replace", "format"):
                _require_small(texts[0], name, texts[1:])
            self._spend(1 + sum(map(_size, args)))
            made = function(*args, **kwargs)
            self._spend(_size(made))
            return made

        return counted


class _Counting(NodeTransformer):
    """Writes into a template what counts its loops and what it writes."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _filtered(cast(nodes.Expr, node.iter), _TURNS, node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _filtered(node, _MADE, node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered(node, _MADE, node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        # What is written is counted there.
        node.nodes = [cast(nodes.Filter, one).node or one if _is_made(one) else one for one in node.nodes]
        characters = sum(len(one.data) for one in node.nodes if isinstance(one, nodes.TemplateData))
        if characters:
            node.nodes.insert(0, _filtered(nodes.Const(characters, lineno=node.lineno), _WRITTEN, node))
        return node


def _is_made(node: nodes.Expr) -> bool:
    return isinstance(node, nodes.Filter) and node.name == _MADE


def _filtered(value: nodes.Expr, name: str, at: nodes.Node) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=at.lineno)


def _size(value: Any) -> int:
    if isinstance(value, str):
        return len(value) // _CHARACTERS
    return len(value) if isinstance(value, list | tuple | dict | range | set) else 0


def _require_small(text: str, method: str, args: Iterable[Any]) -> None:
    """A method of a text, called with numbers or texts, makes nothing huge of it."""
    given = [*args]
    if method in _PADS:
        numbers = [one for one in given if isinstance(one, int)]
        _require(all(abs(one) <= _LARGEST for one in numbers), f"a number given to {method} is too large")
    elif method in ("format", "format_map"):
        _require(not _WIDE.search(text), "a format is too wide")
    elif method == "replace":
        new = max((len(one) for one in given if isinstance(one, str)), default=0)
        _require(len(text) * new <= _CHARACTERS * WORK, "it makes a text too long")
    elif method == "join" and given and isinstance(given[0], list | tuple):
        total = sum(len(one) + len(text) for one in given[0] if isinstance(one, str))
        _require(total <= _CHARACTERS * WORK, "it makes a text too long")


def _require(good: bool, what: str) -> None:
    if not good:
        raise EndlessTemplate(what)
