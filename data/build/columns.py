"""Which columns or fields of a row are what, and how they become a record that trains without further settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from data.records.conversation import MARKERS
from data.errors import DataError, RecordError
from data.records.members import MEDIA, TEXTS
from data.records.markers import special_marker, with_our_markers
from data.records.record_checks import LOSS_FIELDS

_FORMS = ("conversations", "messages", "caption", "text")
"""Of records, the first that one has counts."""
_TURNS = (("conversations", "from", "value"), ("messages", "role", "content"))
_ANSWERS = ("answer", "caption", "text", "label")
MARKED = "without any marker: media before the first question"
PAIRED = "with `texts`, pairs of `user` and `assistant`: became `conversations`"


@dataclass(frozen=True)
class Columns:
    """`--columns`, `--question` and `--quoted`.

    Attributes:
        names: what -> column; what is a name of `data.fields.TEXTS`, "image" or "audio".
        question: asked of every sample that has a caption; empty: none.
        quoted: whether quotes enclose cells of a TSV; in a CSV they always do.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    question: str = ""
    quoted: bool = False

    def __post_init__(self) -> None:
        for what in self.names:
            if what not in (*TEXTS, *MEDIA):
                raise DataError(f"--columns {what}=...: is no part of a record: they are {', '.join((*TEXTS, *MEDIA))}")
        if self.question and "question" in self.names:
            raise DataError("--question and --columns question=... are both given: leave out one of them")

    def media(self, kind: str, usual: Sequence[str]) -> Sequence[str]:
        """The columns with the media of a kind."""
        return [self.names[kind]] if kind in self.names else usual

    @cached_property
    def changes_records(self) -> bool:
        """Whether records are not left as they are."""
        return bool(self.question) or any(name in TEXTS for name in self.names)

    def require(self, known: Sequence[str], where: str) -> None:
        """Raises DataError for a column that is not there."""
        for what, column in self.names.items():
            if column not in known:
                raise DataError(f"--columns {what}={column}: {where} has the columns {', '.join(map(str, known))}")

    def applied(
        self, record: dict[str, Any], counts: Mapping[str, int], where: str
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """(the record, which rules changed it).

        Args:
            counts: kind -> media of the sample.
        """
        rules = []
        if not self.changes_records and "texts" not in record:
            return (record, (MARKED,)) if _mark(record, counts, where) else (record, ())
        given = {what: _value(record, column, where) for what, column in self.names.items() if what in TEXTS}
        if not given and "texts" in record and not any(name in record for name in _FORMS):
            given, rules = {"conversations": record["texts"]}, [PAIRED]
        whole = next((what for what in ("conversations", "messages") if given.get(what) is not None), None)
        answer = next((what for what in _ANSWERS if what in given), None)
        if whole is not None:
            record = _with({whole: _turns(given[whole], where)}, record)
        elif answer is not None:
            record = self._answered(record, given.get("question"), _text(given[answer], answer, where), counts, where)
        elif "question" in given:
            raise RecordError(f"{where}: a question, and no column is its answer: give --columns answer=...")
        elif self.question and not any(name in record for name in ("conversations", "messages")):
            answer = next((name for name in ("caption", "text") if name in record), None)
            if answer is not None:
                record = self._answered(record, None, _text(record[answer], answer, where), counts, where)
        record |= {what: given[what] for what in ("system", "tools") if given.get(what) is not None}
        if _mark(record, counts, where):
            rules.append(MARKED)
        return record, tuple(rules)

    def _answered(
        self, record: dict[str, Any], question: Any, answer: str | None, counts: Mapping[str, int], where: str
    ) -> dict[str, Any]:
        question = _text(question, "question", where) or self.question
        if not question or answer is None:
            return _with({"caption": answer}, record)
        said = [{"from": "human", "value": question}]
        if not _is_marked(question) and not _has_foreign(said, "from", "value", counts, where):
            question = _markers(counts) + question
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        return _with({"conversations": turns}, record)


def _with(form: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """The record in this form and no other."""
    return form | {name: value for name, value in record.items() if name not in _FORMS}


def _value(record: dict[str, Any], column: str, where: str) -> Any:
    if column not in record:
        raise RecordError(f"{where} has no {column!r}; it has {', '.join(sorted(map(str, record))[:8])}")
    return record[column]


def _text(value: Any, what: str, where: str) -> str | None:
    """A text, or None for null. Labels and answers may be whole numbers."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise RecordError(f"{where}: {what} is of type {type(value).__name__}, not a text")


def _turns(value: Any, where: str) -> list[Any]:
    """Turns as they are, from JSON text, or from pairs of `user` and `assistant`."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{where}: its turns are a text that is not JSON ({error})") from error
    if not isinstance(value, list):
        raise RecordError(f"{where}: its turns are of type {type(value).__name__}, not a list")
    if not value or not all(isinstance(one, dict) and {"user", "assistant"} <= one.keys() for one in value):
        return value
    turns = []
    for one in value:
        of_loss = {name: one[name] for name in LOSS_FIELDS if name in one}
        turns += [{"from": "human", "value": one["user"]}, {"from": "gpt", "value": one["assistant"], **of_loss}]
    return turns


def _markers(counts: Mapping[str, int]) -> str:
    return "".join(f"{marker}\n" * counts.get(kind, 0) for marker, kind in MARKERS.items())


def _has_foreign(turns: list[Any], role: str, content: str, counts: Mapping[str, int], where: str) -> bool:
    """True if markers of other families stand for media. Raises RecordError as `with_our_markers` does."""
    try:
        return with_our_markers(turns, role, content, counts) != turns
    except RecordError as error:
        raise RecordError(f"{where}: its text{error}") from None


def _mark(record: dict[str, Any], counts: Mapping[str, int], where: str) -> bool:
    """Put media before the first question, where no turn says where they are."""
    if not any(counts.values()):
        return False
    for name, role, content in _TURNS:
        turns = record.get(name)
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            continue
        for turn in turns:
            if _is_marked(turn.get(content)):
                return False
        if _has_foreign(turns, role, content, counts, where):
            return False
        for at, turn in enumerate(turns):
            said = turn.get(content)
            if turn.get(role) not in ("human", "user"):
                continue
            if isinstance(said, str):
                said = _markers(counts) + said
            elif isinstance(said, list):
                _require_no_special(said, where)
                said = [{"type": kind} for kind in MARKERS.values() for _ in range(counts.get(kind, 0))] + said
            else:
                return False
            record[name] = [*turns[:at], turn | {content: said}, *turns[at + 1 :]]
            return True
        return False
    return False


def _require_no_special(parts: list[Any], where: str) -> None:
    """Raises RecordError for a typed text with a marker that would stay text behind the media."""
    for text in (part.get("text") for part in parts):
        if isinstance(text, str) and (marker := special_marker(text)):
            raise RecordError(f"{where}: a typed text has {marker}, and typed text is literal. Make it a typed part")


def _is_marked(content: Any) -> bool:
    if isinstance(content, str):
        return "<" in content and any(marker in content for marker in MARKERS)
    return isinstance(content, list) and any(
        not isinstance(part, dict) or part.get("type") != "text" for part in content
    )
