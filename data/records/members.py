"""Members of a sample: its record, its images, videos and audio, and unread members.

Names decide, or `data.fields`, which maps members and values of JSON members to the record and the media.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from data.errors import DataError, RecordError
from data.text_format import listed, shown

IMAGES = frozenset(
    ["jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff", "avif", "heic", "heif", "hif"]
    + ["jp2", "j2k"]
)
AUDIO = frozenset(
    ["wav", "flac", "mp3", "ogg", "oga", "opus", "aif", "aiff", "aifc", "au", "snd", "caf", "w64", "rf64"]
)
VIDEO = frozenset(["mp4", "m4v", "mov", "webm", "mkv"])
READABLE = {"image": IMAGES, "video": VIDEO, "audio": AUDIO}
"""kind -> extensions that are decoded."""
UNREADABLE = {
    "image": frozenset(["jxl", "svg", "jpx", "psd", "ico", "dng", "exr"]),
    "video": frozenset(["avi", "mpg", "mpeg", "flv", "wmv", "3gp"]),
    "audio": frozenset(["m4a", "aac", "wma", "amr", "ac3", "weba"]),
}
"""kind -> extensions that are not decoded. They make a sample bad, since ignoring media would change its meaning."""
OTHER_VIDEO = frozenset(["ts"])
"""Extensions of videos that other files have too: code, for example."""
ARRAYS = frozenset(["npy", "npz", "pt", "pth", "safetensors", "pkl", "pickle", "bin", "h5", "hdf5", "parquet", "arrow"])

MEDIA = ("image", "video", "audio")
CONVERSATIONS = ("conversations", "messages")
REJECTED = ("rejected", "rejected_response", "rejected_messages")
PREFERENCES = ("prompt", "chosen", *REJECTED, "completion", "margin")
"""Texts of records of preferences, besides turns and label."""
LEARNED = (*CONVERSATIONS, "answer", "caption", "text", "label", "chosen", "completion")
"""A sample needs one of these."""
TEXTS = (*CONVERSATIONS, "question", "answer", "caption", "text", "label", "system", "tools", *PREFERENCES)
ABSENT: Any = object()
"""Marks a value that a JSON member lacks, unlike null."""
_SOURCE = re.compile(r"([^\[\]\s/?]+)((?:\[[^\[\]]+\])*)(\??)")
_RECORDS = ("json", "txt")
_NUMBER = re.compile(r"(.*?)(\d[\d._-]*)")
_NO_COLUMN = re.compile(r"^\d+\.(?=.*\.)|\.[^.]*$")
"""What surrounds the column of a medium in a row of a table: `left` in `left.png`, or in `0.left.png` among several."""
_MOST_NAMES = 8  # members in a message
_NOUNS = {"image": "an image", "video": "a video", "audio": "audio"}


@dataclass(frozen=True)
class Source:
    """Source of a text: the extension of a member, and the keys of a value if the member is JSON."""

    member: str
    path: tuple[str, ...] = ()
    may_be_absent: bool = False

    def __str__(self) -> str:
        return self.member + "".join(f"[{key}]" for key in self.path)

    @property
    def is_json(self) -> bool:
        return self.member.rpartition(".")[2] == "json"

    def value(self, record: Any) -> Any:
        """Return the value in a JSON member; ABSENT if it has none."""
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
    """The parsed `data.fields`."""

    texts: tuple[tuple[str, Source], ...] = ()
    """(name, source) of each text of the conversation."""
    image: tuple[str, ...] | None = None
    """Extensions of the images in the order of their placeholders; None: names decide."""
    video: tuple[str, ...] | None = None
    audio: tuple[str, ...] | None = None
    key: str = field(default="data.fields", compare=False)

    @property
    def members(self) -> tuple[str, ...]:
        """Extensions of members with texts; empty if names decide."""
        return tuple(dict.fromkeys(source.member for _, source in self.texts))

    @property
    def named_media(self) -> str:
        """The named media as one text; empty if there are none."""
        return "".join(f"|{kind} {getattr(self, kind)}" for kind in MEDIA if getattr(self, kind))

    def media(self, kind: str) -> tuple[str, ...] | None:
        """Return the extensions of a kind; None if names decide. If images or videos are named, only these are read."""
        if kind == "audio":
            return self.audio
        extensions = self.image if kind == "image" else self.video
        return () if extensions is None and (self.image or self.video) else extensions

    def require(self, names: Collection[str], json_keys: Mapping[str, Sequence[str]]) -> None:
        """Raise RecordError if a sample with the texts `names` lacks a required one. One learned text is enough. A
        question is required with every learned text except turns."""
        has = "".join(f"; its {member} has {list(keys)}" for member, keys in json_keys.items())
        learned = [name for name, _ in self.texts if name in LEARNED]
        if not any(name in names for name in learned):
            sought = " and no ".join(str(source) for name, source in self.texts if name in LEARNED)
            raise RecordError(f"{self.key}.{learned[0]}: the sample has no {sought}{has}")
        has_turns = any(name in names for name in CONVERSATIONS)
        for name, source in self.texts:
            if name in (*learned, *names) or source.may_be_absent or (name == "question" and has_turns):
                continue
            raise RecordError(
                f"{self.key}.{name}: the sample has no {source}{has}. If only some samples have one, set "
                f'{name}: "{source}?"'
            )


NO_FIELDS = Fields()


def read_fields(values: Mapping[str, Any], key: str = "data.fields") -> Fields:
    """Parse `data.fields`, e.g. `{caption: caption.txt, label: cls, answer: "json[a][0]", image: [left.jpg]}`.

    Raises DataError, with the key below `data.fields`, for an invalid name or value.
    """
    texts, media = [], dict[str, tuple[str, ...]]()
    for name, value in values.items():
        if name in MEDIA:
            extensions = [value] if isinstance(value, str) else value
            is_list = isinstance(extensions, list | tuple) and all(isinstance(item, str) for item in extensions)
            if not is_list or not extensions:
                raise DataError(f"{name}: must be the extension of a member or a list of extensions, got {value!r}")
            media[name] = tuple(extension.lower().lstrip(".") for extension in extensions)
        elif name in TEXTS:
            texts.append((name, _read_source(name, value)))
        else:
            raise DataError(f"{name}: is not a field of a record. Use {', '.join((*TEXTS, *MEDIA))}")
    names = [name for name, _ in texts]
    if texts and not any(name in LEARNED for name in names):
        raise DataError(f"{names[0]}: no field says what is learned. Add one of {', '.join(LEARNED)}")
    if "tools" in names and not any(name in CONVERSATIONS for name in names):
        raise DataError(f"tools: require {' or '.join(CONVERSATIONS)}. Add one of them")
    return Fields(tuple(texts), **media, key=key)


def _read_source(name: str, value: Any) -> Source:
    match = _SOURCE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise DataError(
            f"{name}: must be the extension of a member, such as txt or caption.txt, or a value in a JSON member, such "
            f"as json[caption], got {value!r}"
        )
    source = Source(match[1].lower().lstrip("."), tuple(re.findall(r"\[([^\[\]]+)\]", match[2])), bool(match[3]))
    if source.path and not source.is_json:
        raise DataError(f"{name}: .{source.member} is not JSON, so it has no values with names. Set {source.member}")
    if source.may_be_absent and name in LEARNED:
        raise DataError(f"{name}: one learned field per sample is enough. Remove the question mark from {value!r}")
    return source


@dataclass(frozen=True)
class Arrangement:
    """The members of a sample in reading order."""

    order: tuple[int, ...]
    """Positions in the shard. Those of each media kind follow the order of its placeholders."""
    kinds: tuple[str, ...]
    """Kind of each member in `order`: "image", "video", "audio" or "other"."""
    record: int
    """Index of the record in `order`; -1 if there is none."""
    reason: str | None
    """Why the sample is bad, as far as names tell."""


def kind_of(extension: str) -> str:
    """Return "image", "video", "audio" or "other"."""
    last = extension.rpartition(".")[2]
    for kind, extensions in READABLE.items():
        if last in extensions or last in UNREADABLE.get(kind, ()):
            return kind
    return "other"


@lru_cache(maxsize=4096)
def arrange(names: tuple[str, ...], fields: Fields = NO_FIELDS) -> Arrangement:
    """Return the arrangement of members with these extensions, given in shard order."""
    kinds = [kind_of(name) for name in names]
    order = list(range(len(names)))
    for kind in READABLE:
        members = [at for at, other in enumerate(kinds) if other == kind]
        read = _read_members(names, members, fields.media(kind))
        for at in members:
            if at not in read:
                kinds[at] = "other"
        for position, at in zip(sorted(read), read, strict=True):
            order[position] = at
    record, reason = _find_record(names, fields)
    at = order.index(record) if record >= 0 else -1
    return Arrangement(tuple(order), tuple(kinds[position] for position in order), at, reason)


def _read_members(names: Sequence[str], members: Sequence[int], wanted: tuple[str, ...] | None) -> list[int]:
    """Return the members of a kind that are read, in the order of their placeholders.

    These are the members in `data.fields`. Otherwise they are those with a plain or numbered extension (`jpg`,
    `0.jpg`), or all members if each has a name (`left.jpg`). If all have one name and a number, numbers give the order.
    """
    if wanted is not None:
        return [
            at
            for name in wanted
            for at in members
            if name in (names[at].lower(), _NO_COLUMN.sub("", names[at]).lower())
        ]
    stems = {at: names[at].rpartition(".")[0] for at in members}
    read = [at for at in members if not any(char.isalpha() for char in stems[at])] or list(members)
    numbers = {at: match for at in read if (match := _NUMBER.fullmatch(stems[at]))}
    if len(numbers) == len(read) and len({match[1] for match in numbers.values()}) == 1:
        return sorted(read, key=lambda at: [int(digits) for digits in re.findall(r"\d+", numbers[at][2])])
    return read


def _find_record(names: Sequence[str], fields: Fields) -> tuple[int, str | None]:
    """Return the index of the record and None, or -1 and the reason. `json` precedes `txt`; `*.json` or `*.txt` must be
    the only one. With `data.fields`, its first member is the record."""
    repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if repeated:
        return -1, f"the extension .{shown(repeated[0])} occurs {names.count(repeated[0])} times under one key"
    members = listed(["." + shown(name) for name in names], _MOST_NAMES)
    if fields.members:
        if record := next((name for name in fields.members if name in names), None):
            return names.index(record), None
        sought = listed([f".{name}" for name in fields.members], _MOST_NAMES)
        return -1, f"none of the members that {fields.key} names ({sought}; members: {members})"
    for last in _RECORDS:
        if last in names:
            return names.index(last), None
        records = [at for at, name in enumerate(names) if name.rpartition(".")[2] == last]
        if len(records) > 1:
            two = " and ".join(f".{shown(names[at])}" for at in records[:2])
            return -1, (
                f"{len(records)} records ({two}) under one key: a key ends at the first dot of the name, so names of "
                "different samples must differ before it; data.fields says which one is read"
            )
        if records:
            return records[0], None
    return -1, f"no .json and no .txt member (members: {members})"


def unread(names: Iterable[str], fields: Fields = NO_FIELDS) -> list[tuple[str, str]]:
    """Return (extension, description) of each unread member."""
    names = tuple(names)
    arranged = arrange(names, fields)
    records = fields.members or (() if arranged.record < 0 else (names[arranged.order[arranged.record]],))
    pairs = zip(arranged.order, arranged.kinds, strict=True)
    rest = [names[at] for at, kind in pairs if kind == "other" and names[at] not in records]
    return [(name, _describe(name, fields)) for name in rest]


def _describe(extension: str, fields: Fields) -> str:
    last = extension.rpartition(".")[2]
    if last in _RECORDS:
        return "a record next to the one that is read"
    if (kind := kind_of(extension)) != "other":
        if fields.media(kind) is not None:
            return f"{_NOUNS[kind]} that {fields.key} does not name"
        return f"{_NOUNS[kind]} with a name, next to others without"
    if last in OTHER_VIDEO:
        return f"video that is not decoded: convert it, video formats are {', '.join(sorted(VIDEO))}"
    return "an array or a file of weights" if last in ARRAYS else "an unknown kind of file"


def named_unread(counts: Mapping[tuple[str, str], int]) -> list[str]:
    """Return a sentence for each kind of unread member. `counts`: (extension, description) -> number of members."""
    sentences = []
    for what in sorted({what for _, what in counts}):
        names = [
            f".{shown(name)} ({counts[name, what]:,})" for name in sorted(n for n, other in counts if other == what)
        ]
        sentences.append(f"members {listed(names, _MOST_NAMES)} are not read: {what}")
    return sentences


_CUT_OFF = {"video": ", or is cut off (`mimo-train shards verify` says why)", "audio": ", or is cut off"}


def why_unreadable(extension: str, kind: str) -> str:
    """Return why no header of a member of this kind was read, the end of a sentence."""
    if extension.rpartition(".")[2] in UNREADABLE.get(kind, ()):
        return f"cannot be decoded: convert it, {kind} formats are {', '.join(sorted(READABLE[kind]))}"
    return f"has no readable {kind} header" + _CUT_OFF.get(kind, "")
