"""What the members of a sample are, by their names alone: its record, its pictures, videos and clips in their order,
and what is not read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from data.records.fields import NO_FIELDS, Fields
from data.text_format import listed, shown

IMAGES = frozenset(
    ["jpg", "jpeg", "jpe", "jfif", "png", "webp", "gif", "bmp", "tif", "tiff", "avif", "heic", "heif", "hif"]
    + ["jp2", "j2k"]
)
AUDIO = frozenset(
    ["wav", "flac", "mp3", "ogg", "oga", "opus", "aif", "aiff", "aifc", "au", "snd", "caf", "w64", "rf64"]
)
UNREADABLE = {
    "image": frozenset(["jxl", "svg", "jpx", "psd", "ico", "dng", "exr"]),
    "audio": frozenset(["m4a", "aac", "wma", "amr", "ac3", "weba"]),
}
"""Pictures and clips that are not decoded: a sample with one is bad, where to overlook it would change its meaning."""
VIDEO = frozenset(["mp4", "m4v", "mov", "webm", "mkv"])
OTHER_VIDEO = frozenset(["avi", "mpg", "mpeg", "flv", "wmv", "3gp", "ts"])
ARRAYS = frozenset(["npy", "npz", "pt", "pth", "safetensors", "pkl", "pickle", "bin", "h5", "hdf5", "parquet", "arrow"])

READABLE = {"image": IMAGES, "video": VIDEO, "audio": AUDIO}
"""Extensions that are decoded, by kind of a medium."""
_ALONE = {"image": "a picture", "video": "a video", "audio": "a clip"}
_RECORDS = ("json", "txt")
_NAMED = 8  # members in a message
_NUMBER = re.compile(r"(.*?)(\d[\d._-]*)")


@dataclass(frozen=True)
class Arrangement:
    """The members of a sample as they are read."""

    order: tuple[int, ...]
    """Places in the shard: those of pictures, of videos and of clips, in the order of their placeholders."""
    kinds: tuple[str, ...]
    """Of each, in that order: "image", "video", "audio" or "other"."""
    record: int
    """Which of them is the record; -1 without any."""
    reason: str | None
    """Why the sample is bad, as far as names tell."""


def kind_of(extension: str) -> str:
    """ "image", "video", "audio" or "other", of a member alone."""
    last = extension.rpartition(".")[2]
    for kind, known in READABLE.items():
        if last in known or last in UNREADABLE.get(kind, ()):
            return kind
    return "other"


@lru_cache(maxsize=4096)
def arrange(names: tuple[str, ...], fields: Fields = NO_FIELDS) -> Arrangement:
    """The arrangement of members with these extensions, in the order of the shard."""
    kinds = [kind_of(name) for name in names]
    order = list(range(len(names)))
    for kind in READABLE:
        own = [at for at, one in enumerate(kinds) if one == kind]
        read = _chosen(names, own, fields.media(kind))
        for at in own:
            if at not in read:
                kinds[at] = "other"
        for place, at in zip(sorted(read), read, strict=True):
            order[place] = at
    record, reason = find_record(names, fields)
    at = order.index(record) if record >= 0 else -1
    return Arrangement(tuple(order), tuple(kinds[place] for place in order), at, reason)


def _chosen(names: Sequence[str], own: Sequence[int], given: tuple[str, ...] | None) -> list[int]:
    """Of the members of a kind those that are read, in the order of their placeholders.

    Those that `data.fields` names, else those whose extension is plain or has a number (`jpg`, `0.jpg`); where all have
    a name before it (`left.jpg`), all. Where all have a number behind the same name, in the order of the numbers.
    """
    if given is not None:
        return [at for name in given for at in own if names[at] == name]
    stems = {at: names[at].rpartition(".")[0] for at in own}
    nameless = [at for at in own if not any(char.isalpha() for char in stems[at])]
    read = nameless or list(own)
    found = [_NUMBER.fullmatch(stems[at]) for at in read]
    if len({match[1] for match in found if match}) == 1 and all(found):
        numbers = {at: [int(one) for one in re.findall(r"\d+", m[2])] for at, m in zip(read, found, strict=True) if m}
        return sorted(read, key=numbers.__getitem__)
    return read


def find_record(names: Sequence[str], fields: Fields = NO_FIELDS) -> tuple[int, str | None]:
    """(which member is the record or -1, why there is none). `json` comes before `txt`; `*.json` and `*.txt` do when
    alone. With `data.fields`, the first of the members that these name."""
    repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if repeated:
        return -1, f"the extension .{shown(repeated[0])} occurs {names.count(repeated[0])} times under one key"
    members = listed(["." + shown(name) for name in names], _NAMED)
    if fields.members:
        for wanted in fields.members:
            if wanted in names:
                return names.index(wanted), None
        sought = listed([f".{name}" for name in fields.members], _NAMED)
        return -1, f"none of the members that {fields.key} names ({sought}; members: {members})"
    for last in _RECORDS:
        if last in names:
            return names.index(last), None
        found = [at for at, name in enumerate(names) if name.rpartition(".")[2] == last]
        if len(found) > 1:
            two = " and ".join(f".{shown(names[at])}" for at in found[:2])
            return -1, (
                f"{len(found)} records ({two}) under one key: a key ends at the first dot of the name, so names of "
                "different samples must differ before it; data.fields says which one is read"
            )
        if found:
            return found[0], None
    return -1, f"no .json and no .txt member (members: {members})"


def unread(names: Iterable[str], fields: Fields = NO_FIELDS) -> list[tuple[str, str]]:
    """(extension, what it is) of the members of a sample that are not read."""
    names = tuple(names)
    found = arrange(names, fields)
    of_record = fields.members or (() if found.record < 0 else (names[found.order[found.record]],))
    rest = [
        names[place]
        for place, kind in zip(found.order, found.kinds, strict=True)
        if kind == "other" and names[place] not in of_record
    ]
    return [(name, _what(name, fields)) for name in rest]


def named_unread(counts: Mapping[tuple[str, str], int]) -> list[str]:
    """A sentence for each kind of members that are not read.

    Args:
        counts: how many, by (extension, what they are).
    """
    sentences = []
    for what in sorted({what for _, what in counts}):
        own = [
            f".{shown(name)} ({counts[name, what]:,})" for name in sorted(name for name, one in counts if one == what)
        ]
        sentences.append(f"members {listed(own, _NAMED)} are not read: {what}")
    return sentences


def _what(extension: str, fields: Fields) -> str:
    last = extension.rpartition(".")[2]
    if last in _RECORDS:
        return "a record beside the one that is read"
    if (kind := kind_of(extension)) != "other":
        if fields.media(kind) is not None:
            return f"{_ALONE[kind]} that {fields.key} does not name"
        return f"{_ALONE[kind]} with a name, beside others without"
    if last in OTHER_VIDEO:
        return f"video that is not decoded: convert it, video formats are {', '.join(sorted(VIDEO))}"
    return "an array or a file of weights" if last in ARRAYS else "of no kind that is known"
