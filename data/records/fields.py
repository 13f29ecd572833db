"""`data.fields`: which members of a sample, and which values of its JSON, are its record and its media."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from data.errors import DataError, RecordError

MEDIA = ("image", "video", "audio")
TEXTS = ("conversations", "messages", "question", "answer", "caption", "text", "label", "system", "tools")
"""Names of what a record may have, beside those of media."""
CONVERSATIONS = ("conversations", "messages")
LEARNED = (*CONVERSATIONS, "answer", "caption", "text", "label")
"""Of these a sample needs one."""
_FORM = re.compile(r"([^\[\]\s/?]+)((?:\[[^\[\]]+\])*)(\??)")
ABSENT: Any = object()
"""What a JSON member does not have, unlike null."""


@dataclass(frozen=True)
class Source:
    """Where a field comes from: a member by its extension, and in a JSON member the keys that lead to it."""

    member: str
    path: tuple[str, ...] = ()
    may_be_absent: bool = False

    def __str__(self) -> str:
        return self.member + "".join(f"[{key}]" for key in self.path)

    @property
    def is_json(self) -> bool:
        """Whether the member is JSON."""
        return self.member.rpartition(".")[2] == "json"

    def value(self, record: Any) -> Any:
        """The value in a JSON member; ABSENT where it is not there."""
        for key in self.path:
            if isinstance(record, dict):
                record = record.get(key, ABSENT)
            elif isinstance(record, list) and key.isdecimal() and int(key) < len(record):
                record = record[int(key)]
            else:
                return ABSENT
        return record


@dataclass(frozen=True)
class Fields:
    """`data.fields`, read."""

    texts: tuple[tuple[str, Source], ...] = ()
    """(name, source) of what becomes the conversation."""
    image: tuple[str, ...] | None = None
    """Extensions of the pictures, in the order of their placeholders; None: as names say."""
    video: tuple[str, ...] | None = None
    audio: tuple[str, ...] | None = None
    key: str = field(default="data.fields", compare=False)
    """Of the config."""

    def require(self, found: Collection[str], there: Mapping[str, Sequence[str]]) -> None:
        """Looks for what a sample lacks of the texts that are named.

        found: names of those that it has. Of those that are learned one is enough; a question goes with the last four.
        there: keys of its JSON members, by member, for the message.

        Raises:
            RecordError: a text that may not be absent is.
        """
        has = "".join(f"; its {member} has {list(keys)}" for member, keys in there.items())
        learned = [name for name, _ in self.texts if name in LEARNED]
        if not any(name in found for name in learned):
            sought = " and no ".join(str(source) for name, source in self.texts if name in LEARNED)
            raise RecordError(f"{self.key}.{learned[0]}: the sample has no {sought}{has}")
        is_whole = any(name in found for name in CONVERSATIONS)
        for name, source in self.texts:
            if name in (*learned, *found) or source.may_be_absent or (name == "question" and is_whole):
                continue
            raise RecordError(
                f"{self.key}.{name}: the sample has no {source}{has}; where not all samples have one: "
                f'{name}: "{source}?"'
            )

    @property
    def members(self) -> tuple[str, ...]:
        """Extensions of the members that hold texts; empty: the record is the one that names say."""
        return tuple(dict.fromkeys(source.member for _, source in self.texts))

    @property
    def named_media(self) -> str:
        """The media that are named; empty: none are."""
        return "".join(f"|{kind} {getattr(self, kind)}" for kind in MEDIA if getattr(self, kind))

    def media(self, kind: str) -> tuple[str, ...] | None:
        """Extensions of this kind; None: as names say. Of pictures and videos only those that are named are read, where
        any is."""
        if kind == "audio":
            return self.audio
        named = self.image if kind == "image" else self.video
        return () if named is None and (self.image or self.video) else named


NO_FIELDS = Fields()


def read_fields(given: Mapping[str, Any], key: str = "data.fields") -> Fields:
    """`data.fields` as a config has it: `{caption: caption.txt, label: cls, answer: "json[a][0]", image: [left.jpg]}`.

    key: of the config, for messages about samples.

    Raises:
        DataError: of another form; the message begins with the key below `data.fields`, if it is one's, and a colon.
    """
    texts, media = [], dict[str, tuple[str, ...]]()
    for name, value in given.items():
        if name in MEDIA:
            names = [value] if isinstance(value, str) else value
            if not isinstance(names, list | tuple) or not names or not all(isinstance(one, str) for one in names):
                raise DataError(f"{name}: must be the extension of a member, or a list of such, is {value!r}")
            media[name] = tuple(one.lower().lstrip(".") for one in names)
        elif name in TEXTS:
            texts.append((name, _source(name, value)))
        else:
            raise DataError(f"{name}: is no field of a record: they are {', '.join((*TEXTS, *MEDIA))}")
    names = [name for name, _ in texts]
    if texts and not any(name in LEARNED for name in names):
        raise DataError(f"{names[0]}: nothing says what is learned: give one of {', '.join(LEARNED)} too")
    if "tools" in names and not any(name in CONVERSATIONS for name in names):
        raise DataError(f"tools: have a place in {' or '.join(CONVERSATIONS)} only, and none is given")
    return Fields(tuple(texts), **media, key=key)


def _source(name: str, value: Any) -> Source:
    found = _FORM.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise DataError(
            f"{name}: must be the extension of a member, such as txt or caption.txt, or a value in a JSON member, such "
            f"as json[caption], is {value!r}"
        )
    source = Source(found[1].lower().lstrip("."), tuple(re.findall(r"\[([^\[\]]+)\]", found[2])), bool(found[3]))
    if source.path and not source.is_json:
        raise DataError(f"{name}: .{source.member} is no JSON, so that nothing in it has a name: give {source.member}")
    if source.may_be_absent and name in LEARNED:
        raise DataError(f"{name}: of what is learned one is enough: leave out the question mark of {value!r}")
    return source
