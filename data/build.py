"""A file of records and a folder of media -> shards: what LLaVA's JSON and lists like it become.

A record names its files by `image` and `audio` (or `images`, `audios`), one or a list, below the folder; everything in
it goes into the shard as it is. Whether a sample can be trained on is seen here, before anything is written.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.errors import DataError, RecordError
from data.listed import listed
from data.members import AUDIO, IMAGES
from data.records import parse_record
from data.storage.write import write_shard

NAMED = 5
"""Faults that an error shows; the rest is counted."""

_KINDS = {"image": ("image", "images", IMAGES), "audio": ("audio", "audios", AUDIO)}
"""By kind of a medium: the fields of a record that name its files, and the extensions that can be decoded."""


@dataclass(frozen=True)
class Built:
    """What was written."""

    samples: dict[str, int]
    """By part, `train` and `held_out`."""
    left_out: list[str] = field(default_factory=list)
    """A sentence for each record that cannot be used."""


@dataclass(frozen=True)
class _Sample:
    record: Any
    files: list[Path]


def build_shards(
    records: Path, media: Path, to: Path, *, held_out: int = 0, per_shard: int = 1000, skip_bad: bool = False
) -> Built:
    """Write the shards `to/train/train-000000.tar`, ..., and `to/held_out/held_out-000000.tar`, ... if there are any.

    Args:
        records: a JSON list, or a file with a JSON object a line.
        media: folder that the files of the records are in.
        held_out: records that are set aside, evenly over the file.
        per_shard: samples of a shard.
        skip_bad: leave out records that cannot be used, instead of raising.

    Raises:
        DataError: the records cannot be read, some cannot be used (with the first of them), or there are shards in `to`
            already.
    """
    for part in ("train", "held_out"):
        if any((to / part).glob("*.tar")):
            raise DataError(f"{to / part} holds shards already: choose another folder, or move them")
    if not media.is_dir():
        raise DataError(f"no folder {media} with the files that the records name")
    samples, faults = [], []
    for number, record in enumerate(_read(records)):
        try:
            samples.append(_sample(record, media, f"record {number}"))
        except RecordError as error:
            faults.append(str(error))
    if faults and not skip_bad:
        raise DataError(
            f"{len(faults)} of {len(samples) + len(faults)} records of {records} cannot be used; nothing was written. "
            "Mend them, or leave them out with --skip-bad:\n" + listed(faults, NAMED, between="\n", before_more="\n")
        )
    if len(samples) <= held_out:
        raise DataError(f"{records} has {len(samples)} records that can be used: hold out fewer, not {held_out}")
    aside = {(2 * at + 1) * len(samples) // (2 * held_out) for at in range(held_out)}
    parts = {"train": [one for at, one in enumerate(samples) if at not in aside]}
    if held_out:
        parts["held_out"] = [one for at, one in enumerate(samples) if at in aside]
    for name, own in parts.items():
        for shard, first in enumerate(range(0, len(own), per_shard)):
            path = to / name / f"{name}-{shard:06d}.tar"
            write_shard(path, map(_members, own[first : first + per_shard]), first)
    return Built({name: len(own) for name, own in parts.items()}, faults)


def _read(records: Path) -> list[Any]:
    try:
        text = records.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{records} is not UTF-8 ({error.reason} at byte {error.start})") from error
    try:
        if not text.lstrip().startswith("["):
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{records} is neither a JSON list nor a JSON object a line ({error})") from error


def _sample(record: Any, media: Path, where: str) -> _Sample:
    if not isinstance(record, dict):
        raise RecordError(f"{where} is a JSON {type(record).__name__}, not an object")
    files, counts = [], {}
    for kind, (one, several, extensions) in _KINDS.items():
        names = _names(record, one, several, where)
        counts[kind] = len(names)
        for name in names:
            file = media / name
            if _extension(file) not in extensions:
                raise RecordError(f"{where}: {name} is no {kind} that can be decoded ({', '.join(sorted(extensions))})")
            if not file.is_file():
                raise RecordError(f"{where}: no file {file}")
            files.append(file)
    try:
        parse_record(json.dumps(record).encode(), "json", where, counts)
    except RecordError as error:
        raise RecordError(str(error).replace(f"key {where!r}", where)) from error
    return _Sample(record, files)


def _names(record: dict[str, Any], one: str, several: str, where: str) -> Sequence[str]:
    given = [name for name in (one, several) if record.get(name) not in (None, "", [])]
    if len(given) > 1:
        raise RecordError(f"{where} has both {one} and {several}")
    value = record[given[0]] if given else []
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RecordError(f"{where}: {given[0]} is neither the name of a file nor a list of such")
    return names


def _extension(file: Path) -> str:
    return file.suffix[1:].lower()


def _members(sample: _Sample) -> list[tuple[str, bytes]]:
    several = len(sample.files) > 1
    members = [
        (f"{at}.{_extension(file)}" if several else _extension(file), file.read_bytes())
        for at, file in enumerate(sample.files)
    ]
    return [*members, ("json", json.dumps(sample.record, ensure_ascii=False).encode())]
