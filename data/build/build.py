"""Build shards from a dataset: JSON, CSV, Hugging Face datasets, output of img2dataset, tars, folders of files.

All rows are checked and spooled before a shard is written. The shards depend only on source and settings. They are
written into a temporary folder, which is renamed when it is complete, or whose content moves into an empty folder.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.build.sources import Source
from data.errors import DataError, NothingToLearn, RecordError, ShardError, UnknownRecord
from data.order.order import GlobalOrder
from data.records.members import READABLE
from data.rows.media_values import FileRange, size_of
from data.samples.bad_samples import allowed_of
from data.storage.files import Busy, file_lock
from data.storage.tar import tar_bytes, write_shard
from data.text_format import listed, plural
from data.workers import worker_processes

SHOWN_FAULTS = 5
LEFT_OUT = "left_out.jsonl"
"""File next to the shards with a line for each omitted row."""
SUMMARY = "build.json"
"""File next to the shards with their source and settings."""
_SPOOLS, _WORK = "spools", ".building"
_LONGEST_REASON = 10000  # characters

Progress = Callable[[str, int, int | None], None]
"""(name of the step, rows or samples since the last call, total or None)."""


@dataclass(frozen=True)
class Settings:
    """Settings of a build. Together with the source they determine the shards."""

    held_out: int = 0
    """Number of held-out samples, evenly spaced over the source."""
    per_shard: int = 1000
    """Maximum samples of a shard."""
    shard_bytes: int = 1 << 30
    """Maximum bytes of a shard's samples; a single sample may exceed it."""
    seed: int | None = 0
    """Seed of the order of samples; None: the order of the source."""
    skip_bad: bool = False
    """True to omit unusable rows instead of failing."""
    max_bad: float = 0.1
    """Maximum rows that `skip_bad` may omit: a number or, below 1, a fraction of all."""


@dataclass(frozen=True)
class Built:
    """Result of a build."""

    samples: dict[str, int]
    """Samples of `train` and `held_out`."""
    shards: dict[str, int]
    media: dict[str, int]
    """kind -> images, videos and audio items in the samples."""
    left_out: int
    """Unusable rows."""
    notes: list[str] = field(default_factory=list)


class _Part(NamedTuple):
    """Data read from a part of the source."""

    samples: np.ndarray
    """[samples, 3] int64: offset and length in the part's spool, and bytes in a shard."""
    faults: list[str]
    """A sentence for each unusable row."""
    unknown: int
    """Number of `faults` of records without a known name."""
    nulls: dict[str, tuple[int, str]]
    """`NothingToLearn.what` -> (number of such rows, a sentence for the first)."""
    notes: Counter[str]
    media: Counter[str]


class _Shard(NamedTuple):
    path: Path
    samples: np.ndarray
    """[samples, 3] int64: part of the source, and offset and length in its spool."""


def build_shards(
    source: Source, to: Path, settings: Settings, *, workers: int = 1, progress: Progress = lambda *_: None
) -> Built:
    """Write the shards `to/train/train-000000.tar`, ..., and `to/held_out/held_out-000000.tar`, ... if any.

    Raises:
        DataError: the source or some rows are unusable, or `to` is not empty.
        OSError: a file cannot be read or written.
    """
    to = to.resolve()
    if to.exists() and any(not entry.name.startswith(_WORK) for entry in to.iterdir()):
        raise DataError(f"{to} is not empty: choose another folder, or remove it")
    # A folder that exists is filled, since it may be a mount or a shell's current folder, which nothing can replace.
    work = to / _WORK if to.exists() else to.parent / f".{to.name}{_WORK}"
    work.parent.mkdir(parents=True, exist_ok=True)
    try:
        with file_lock(work.with_name(f"{work.name}.lock"), wait=False):
            shutil.rmtree(work, ignore_errors=True)  # of a killed build
            try:
                (work / _SPOOLS).mkdir(parents=True)
                built = _build(source, work, settings, workers, progress)
                shutil.rmtree(work / _SPOOLS)
                if to.exists():
                    for name in sorted(os.listdir(work), reverse=True):  # `train` before `held_out`
                        (work / name).rename(to / name)
                else:
                    work.rename(to)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except Busy as error:
        raise DataError(f"{to}: another process builds shards there. Wait for it, or choose another folder") from error
    return built


def _build(source: Source, to: Path, settings: Settings, workers: int, progress: Progress) -> Built:
    notes, spools = source.notes(), to / _SPOOLS
    parts = _read_parts(source, spools, workers, progress)
    faults = [fault for part in parts for fault in part.faults]
    samples = sum(len(part.samples) for part in parts)
    if error := _error(source, settings, samples, faults, sum(part.unknown for part in parts)):
        raise DataError(error)
    shards = _plan_shards(to, [part.samples for part in parts], settings)
    _write_shards(shards, spools, workers, progress)
    counts: Counter[str] = Counter()
    for shard in shards:
        counts[shard.path.parent.name] += len(shard.samples)
    built = Built(
        dict(counts),
        dict(Counter(shard.path.parent.name for shard in shards)),
        {kind: sum(part.media[kind] for part in parts) for kind in READABLE},
        len(faults),
        [*notes, *_notes(parts)],
    )
    if faults:
        (to / LEFT_OUT).write_text("".join(json.dumps({"reason": fault}) + "\n" for fault in faults))
    (to / SUMMARY).write_text(json.dumps({"source": str(source)} | asdict(settings) | asdict(built), indent=1))
    return built


def _read_parts(source: Source, spools: Path, workers: int, progress: Progress) -> list[_Part]:
    step, parts = "reading rows", dict[int, _Part]()
    numbers = range(len(source.parts))
    progress(step, 0, None)
    if workers == 1 or len(numbers) == 1:
        for number in numbers:
            parts[number] = _read_part(source, spools, number, lambda rows: progress(step, rows, None))
    else:
        for number, part in _in_processes(partial(_read_part, source, spools), numbers, workers):
            parts[number] = part
            progress(step, len(part.samples), None)
    return [parts[number] for number in numbers]


def _in_processes(work: Callable[[Any], Any], jobs: Iterable[Any], workers: int) -> Iterator[tuple[Any, Any]]:
    """Yield (job, result) as jobs end. The first error stops all."""
    with worker_processes(workers) as pool:
        futures = {pool.submit(work, job): job for job in jobs}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _read_part(source: Source, spools: Path, number: int, progress: Callable[[int], None] = lambda _: None) -> _Part:
    """Read a part of the source and spool its samples. Raises DataError."""
    samples, part = array("q"), _Part(np.empty(0), [], 0, {}, Counter(), Counter())
    offset, unknown = 0, 0
    with open(_spool(spools, number), "wb") as spool:
        try:
            for seen, row in enumerate(source.rows(source.parts[number]), 1):
                if seen % 1000 == 0:
                    progress(1000)
                try:
                    sample = row()
                except NothingToLearn as error:
                    count, first = part.nulls.get(error.what, (0, str(error)[:_LONGEST_REASON]))
                    part.nulls[error.what] = count + 1, first
                    continue
                except RecordError as error:
                    part.faults.append(str(error)[:_LONGEST_REASON])
                    unknown += isinstance(error, UnknownRecord)
                    continue
                raw = pickle.dumps(sample.members)
                spool.write(raw)
                size = sum(tar_bytes(size_of(content)) for _, content in sample.members)
                samples.extend((offset, len(raw), size))
                offset += len(raw)
                part.notes.update(sample.notes)
                part.media.update(sample.kinds)
        except ShardError as error:
            part.faults.append(f"{error} Of this tar nothing was taken.")
    return part._replace(samples=np.array(samples, dtype=np.int64).reshape(-1, 3), unknown=unknown)


def _spool(spools: Path, number: int) -> Path:
    return spools / f"part-{number:06d}"


def _contents(members: Sequence[tuple[str, bytes | FileRange]]) -> list[tuple[str, bytes]]:
    """Return the members with their bytes. Raises DataError for a file that has changed."""
    contents = []
    for extension, content in members:
        raw = content.read() if isinstance(content, FileRange) else content
        if isinstance(content, FileRange) and len(raw) != content.size:
            raise DataError(f"{content.path} changed while shards were built of it: start again")
        contents.append((extension, raw))
    return contents


def _error(source: Source, settings: Settings, samples: int, faults: Sequence[str], unknown: int) -> str:
    """Return why nothing can be written; "" if it can."""
    total, shown = samples + len(faults), listed(faults, SHOWN_FAULTS, between="\n", before_more="\n")
    if faults and not samples and unknown == len(faults):
        shown += "\nNo record has a name that says what it is: give it with --columns, such as caption=COLUMN or "
        shown += "question=COLUMN answer=COLUMN"
    bad = f"{len(faults)} of {total} records of {source} cannot be used"
    if faults and not settings.skip_bad:
        return f"{bad}; nothing was written. Mend them, or leave them out with --skip-bad:\n{shown}"
    if len(faults) > allowed_of(settings.max_bad, total):
        return (
            f"{bad}, more than --max-bad {settings.max_bad:g} allows to skip; nothing was written. Repair them, or "
            f"raise --max-bad:\n{shown}"
        )
    if samples > settings.held_out:
        return ""
    first = f", such as: {shown}" if faults else ""
    if settings.held_out:
        usable = f"{plural(samples, 'record')} that can be used{first}"
        return f"{source} has {usable}: hold out fewer, not {settings.held_out}"
    return f"{source} has no record that can be used{first}"


def _plan_shards(to: Path, parts: Sequence[np.ndarray], settings: Settings) -> list[_Shard]:
    samples = np.concatenate([np.insert(part, 0, number, axis=1) for number, part in enumerate(parts)])
    sizes, samples = samples[:, 3], samples[:, :3]
    total, held_out = len(samples), settings.held_out
    is_held_out = np.zeros(total, dtype=bool)
    is_held_out[[(2 * at + 1) * total // (2 * held_out) for at in range(held_out)]] = True
    shards = []
    for name, rows in (("train", np.flatnonzero(~is_held_out)), ("held_out", np.flatnonzero(is_held_out))):
        if settings.seed is not None:
            rows = rows[GlobalOrder(len(rows), settings.seed, True).rows(np.arange(len(rows)))] if len(rows) else rows
        ends, start, number = np.cumsum(sizes[rows]), 0, 0
        while start < len(rows):
            before = int(ends[start - 1]) if start else 0
            fitting = int(np.searchsorted(ends, before + settings.shard_bytes, side="right"))
            end = min(max(fitting, start + 1), start + settings.per_shard, len(rows))
            shards.append(_Shard(to / name / f"{name}-{number:06d}.tar", samples[rows[start:end]]))
            start, number = end, number + 1
    return shards


def _write_shards(shards: Sequence[_Shard], spools: Path, workers: int, progress: Progress) -> None:
    step, total = "writing samples", sum(len(shard.samples) for shard in shards)
    progress(step, 0, total)
    if workers == 1 or len(shards) == 1:
        for shard in shards:
            _write_shard(spools, shard)
            progress(step, len(shard.samples), total)
        return
    for shard, _ in _in_processes(partial(_write_shard, spools), shards, workers):
        progress(step, len(shard.samples), total)


def _write_shard(spools: Path, shard: _Shard) -> None:
    spooled = (FileRange(str(_spool(spools, part)), offset, size) for part, offset, size in shard.samples.tolist())
    write_shard(shard.path, (_contents(pickle.loads(sample.read())) for sample in spooled))


def _notes(parts: Sequence[_Part]) -> list[str]:
    notes = []
    for what in sorted({what for part in parts for what in part.nulls}):
        counts, firsts = zip(*(part.nulls[what] for part in parts if what in part.nulls), strict=True)
        notes.append(f"{sum(counts)} {what} are left out, such as {firsts[0]}")
    changed: Counter[str] = Counter()
    for part in parts:
        changed.update(part.notes)
    return [*notes, *(f"{plural(count, 'record')} {change}" for change, count in changed.items())]
