"""Samples that have their members already: tars of img2dataset and others, and folders of files that share a name."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from data.records.record_checks import OtherMembers
from data.build.columns import Columns
from data.build.media import Medium, Place, extent_of, wrong_extent
from data.build.samples import Sample, checked, counts_of, picture_of, require_name, sample_of
from data.build.values import require_no_media
from data.errors import RecordError
from data.index.shard_index import build_index
from data.records.members import READABLE, arrange, unread
from data.records.record_checks import text_of_file
from data.text_format import plural, shown
from data.storage.files import pread_all

_NAME = re.compile(r"([^.]+)[.](.+)")
_STATS = "_stats.json"  # of img2dataset, beside a shard
_READ = os.O_RDONLY | os.O_CLOEXEC


class _Member(NamedTuple):
    extension: str
    kind: str
    place: Place
    extent: tuple[int, int] | None
    """Of a medium, see `data.building.media.extent_of`."""


@dataclass(frozen=True)
class Tars:
    """WebDataset tars, such as those of img2dataset."""

    tars: Sequence[Path]
    columns: Columns

    @property
    def what(self) -> str:
        """Them, for messages."""
        return str(self.tars[0].parent)

    @property
    def parts(self) -> Sequence[Path]:
        """The tars."""
        return self.tars

    def notes(self) -> Sequence[str]:
        """Nothing."""
        return ()

    def rows(self, part: Path) -> Iterator[tuple[str, Callable[[], Sample | None]]]:
        """Every sample of a tar; first what img2dataset's statistics say of it."""
        index, path = build_index(part), str(part)
        yield part.name, partial(_require_stats, part, len(index))
        fd = os.open(path, _READ)
        try:
            for row in range(len(index)):
                key, reason, at = index.key(row), index.bad_reason(row), index.record(row)
                members = [
                    _Member(one.extension, one.kind, Place(path, one.offset, one.size), one.extent)
                    for one in index.members(row)
                ]
                where = f"{part.name}: {shown(key)}"
                yield where, partial(_sample, self.columns, where, key, members, at, reason, fd)
        finally:
            os.close(fd)


@dataclass(frozen=True)
class Folders:
    """Files of one folder that share their name up to the first dot: a medium, and its record or caption."""

    folder: Path
    folders: Sequence[Path]
    """Those that files are in."""
    columns: Columns

    @property
    def what(self) -> str:
        """It, for messages."""
        return str(self.folder)

    @property
    def parts(self) -> Sequence[Path]:
        """The folders with files."""
        return self.folders

    def notes(self) -> Sequence[str]:
        """Nothing."""
        return ()

    def rows(self, part: Path) -> Iterator[tuple[str, Callable[[], Sample | None]]]:
        """Every sample of a folder, in the order of names."""
        groups: dict[str, list[str]] = {}
        for name in sorted(entry.name for entry in os.scandir(part) if entry.is_file()):
            if (found := _NAME.fullmatch(name)) and not name.endswith(_STATS):
                groups.setdefault(found[1], []).append(found[2])
        folder, inside = str(part), str(part.relative_to(self.folder))
        for key, names in groups.items():
            where = key if inside == "." else os.path.join(inside, key)
            yield where, partial(self._sample, folder, where, key, names)

    def _sample(self, folder: str, where: str, key: str, names: list[str]) -> Sample:
        files = {name.lower(): os.path.join(folder, f"{key}.{name}") for name in names}
        if len(files) < len(names):
            raise RecordError(f"{where}: two files whose endings differ by case alone")
        found = arrange(tuple(files))
        own = list(files.items())
        members = []
        for at, kind in zip(found.order, found.kinds, strict=True):
            extension, path = own[at]
            place = Place(path, None, os.stat(path).st_size)
            looked_at = kind in READABLE and found.reason is None
            members.append(_Member(extension, kind, place, extent_of(kind, place) if looked_at else None))
        record = None if found.record < 0 else found.record
        return _sample(self.columns, where, key, members, record, found.reason)


def _sample(
    columns: Columns,
    where: str,
    key: str,
    members: Sequence[_Member],
    at: int | None,
    reason: str | None,
    fd: int | None = None,
) -> Sample:
    """A sample of members; all of them stay as they are, unless rules change the record.

    Args:
        fd: of the file that all members are in; None: each is a file.
    """
    if reason is not None or at is None:
        raise RecordError(f"{where}: {reason}")
    for member in members:
        require_name(member.extension, where)
    record, media = members[at], [member for member in members if member.kind in READABLE]
    raw = _read(record.place, fd)
    is_json = record.extension.rpartition(".")[2] == "json"
    if columns.changes_records:
        read = [Medium(one.kind, one.extension, one.place, f".{one.extension}", one.extent) for one in media]
        made = sample_of(_record(raw, is_json, where), read, columns, where)
        rest = [(one.extension, one.place) for one in members if one is not record]
        return Sample([*rest, made.members[-1]], key, made.rules)
    for member in media:
        if said := wrong_extent(member.kind, member.extent):
            raise RecordError(f"{where}: .{shown(member.extension)}{said}")
    names = {kind: [one.extension for one in media if one.kind == kind] for kind in READABLE}
    counts = counts_of([one.kind for one in media])
    others = OtherMembers(names, [name for name, _ in unread(member.extension for member in members)])
    pictures = [picture_of(one.extension, one.kind) for one in media if one.kind != "audio"]
    checked(raw, record.extension, where, counts, others, pictures)
    if not media and is_json:
        require_no_media(_record(raw, is_json, where), {}, where)
    return Sample([(member.extension, member.place) for member in members], key)


def _read(place: Place, fd: int | None) -> bytes:
    own = os.open(place.path, _READ) if fd is None else fd
    try:
        return pread_all(own, place.size, place.offset or 0)
    finally:
        if fd is None:
            os.close(own)


def _record(raw: bytes, is_json: bool, where: str) -> Any:
    """What a member with the record says, as JSON has it."""
    try:
        text = raw.decode("utf-8-sig")
        return json.loads(text) if is_json else {"caption": text_of_file(text)}
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{where}: its record is not {'JSON' if is_json else 'UTF-8'} ({error})") from error


def _require_stats(tar: Path, samples: int) -> None:
    """Raises RecordError if the statistics of img2dataset next to a tar count other samples than it has.

    The tars of video2dataset also have the records of failed downloads.
    """
    try:
        stats = json.loads(tar.with_name(tar.stem + _STATS).read_bytes())
    except FileNotFoundError:
        return
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{tar.stem + _STATS} is not JSON ({error})") from error
    said = stats.get("successes") if isinstance(stats, dict) else None
    if isinstance(said, int) and samples not in (said, stats.get("count")):
        raise RecordError(
            f"{tar.name} has {plural(samples, 'sample')}, and {tar.stem + _STATS} counts {said}: some are missing"
        )
