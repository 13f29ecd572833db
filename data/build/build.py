"""Shards from what people have: LLaVA's JSON, CSV, Hugging Face datasets, img2dataset's output, tars, folders of files.

Two steps, each in parallel and each going on after a kill. First every part of the source is read: whether its samples
can be trained on is seen before any shard is written (`data.building.parts`). Then the shards are planned by what their
samples take, and written one by one; a shard appears when it is whole. The plan follows from the source and the
settings alone, so that shards are the same however often the work was stopped.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data.samples.bad_samples import allowed_of
from data.build.find import fingerprint
from data.build.parts import Contents, Part, done_part, read_part, rows_of
from data.build.samples import Source
from data.errors import DataError
from data.text_format import listed
from data.records.members import READABLE
from data.order.order import GlobalOrder
from data.processes import worker_processes
from data.text_format import plural
from data.storage.files import replacing
from data.storage.write import shard_bytes, shard_file

NAMED = 5
"""Faults that an error shows; the rest is counted."""
LEFT_OUT = "left_out.jsonl"
"""In the folder of the shards: a line for each row that was left out."""
SUMMARY = "build.json"
"""In the folder of the shards: what they were built of, and how."""
_WORK, _DONE = ".build", ".built"
_VERSION = 3

Progress = Callable[[str, int, int | None], None]
"""(what is done, how many more, of how many; None: not known)."""


@dataclass(frozen=True)
class Settings:
    """What shards follow from, besides their source."""

    held_out: int = 0
    """Samples that are set aside, evenly over the source."""
    per_shard: int = 1000
    """Most samples of a shard."""
    shard_bytes: int = 1 << 30
    """A shard is full before it would be larger; one sample alone may be."""
    seed: int | None = 0
    """Of the order of samples; None: that of the source."""
    skip_bad: bool = False
    """Rows that cannot be used are left out, instead of an error."""
    max_bad: float = 0.1
    """Rows that `skip_bad` may leave out: a number or, below 1, a fraction of all."""


@dataclass(frozen=True)
class Built:
    """What was written."""

    samples: dict[str, int]
    """By part, `train` and `held_out`."""
    shards: dict[str, int]
    media: dict[str, int]
    """Images, videos and clips in the samples, by kind."""
    left_out: int
    """Rows that cannot be used."""
    notes: list[str] = field(default_factory=list)
    """What else its user should know, a sentence each."""


@dataclass(frozen=True)
class _Shard:
    """A shard to be written: samples by part of the source and place in it."""

    path: Path
    first: int
    lines: np.ndarray  # [samples, 4] part, at, length, line, see `data.building.parts.ROW`
    bytes: int


def build_shards(
    source: Source, to: Path, settings: Settings, *, workers: int = 1, progress: Progress = lambda *_: None
) -> Built:
    """Write the shards `to/train/train-000000.tar`, ..., and `to/held_out/held_out-000000.tar`, ... if there are any.

    Raises:
        DataError: the source cannot be read, some rows cannot be used (with the first of them), or `to` holds shards,
            or work that another source or other settings began.
        OSError: a file cannot be read or written.
    """
    notes, was_there = list(source.notes()), to.exists()
    with _working(to, _settings_of(source, settings)) as work:
        parts = _read_parts(source, work, workers, progress)
        faults = [fault for part in parts for fault in part.faults]
        samples = sum(part.samples for part in parts)
        wrong = _wrong(source, settings, samples, faults)
        if wrong and faults and not samples and sum(part.unknown for part in parts) == len(faults):
            wrong += "\nNo record has a name that says what it is: give it with --columns, such as caption=COLUMN"
        if wrong:
            shutil.rmtree(work)
            if not was_there:
                to.rmdir()
            raise DataError(wrong)
        rows = rows_of(work, len(parts))
        planned, counts = _planned(to, rows, settings)
        _write_shards(planned, work, workers, progress)
        built = Built(
            counts,
            dict(Counter(shard.path.parent.name for shard in planned)),
            {kind: sum(part.media.get(kind, 0) for part in parts) for kind in READABLE},
            len(faults),
            [*notes, *_notes(parts, rows)],
        )
        if faults:
            with replacing(to / LEFT_OUT) as file:
                file.writelines(json.dumps({"reason": fault}).encode() + b"\n" for fault in faults)
        with replacing(to / SUMMARY) as file:
            file.write(json.dumps({"source": source.what} | asdict(settings) | asdict(built), indent=1).encode())
        os.replace(work, to / _DONE)
    shutil.rmtree(to / _DONE)
    return built


@contextmanager
def _working(to: Path, settings: dict[str, Any]) -> Iterator[Path]:
    """The folder of what is not done yet, by this process alone."""
    work = to / _WORK
    shutil.rmtree(to / _DONE, ignore_errors=True)  # of a process that was killed as it ended
    given = work / "settings.json"
    if not work.exists():
        for part in ("train", "held_out"):
            if any((to / part).glob("*.tar")):
                raise DataError(f"{to / part} holds shards already: choose another folder, or move them")
    work.mkdir(parents=True, exist_ok=True)
    with open(work / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends
        except BlockingIOError as error:
            raise DataError(
                f"{to}: another process builds shards there: wait for it, or choose another folder"
            ) from error
        if given.exists():
            before = json.loads(given.read_bytes())
            if others := [name for name in settings if before.get(name) != settings[name]]:
                said = ", ".join(
                    f"{name} ({_short(before.get(name))}, now {_short(settings[name])})" for name in others
                )
                raise DataError(
                    f"{to} holds shards that were begun with another {said}: go on with the same, or remove {work} and "
                    "the shards"
                )
        else:
            with replacing(given) as file:
                file.write(json.dumps(settings).encode())
        for folder in (work, to / "train", to / "held_out"):
            for left in folder.glob(".*.tmp"):  # of a process that was killed
                left.unlink()
        yield work


def _settings_of(source: Source, settings: Settings) -> dict[str, Any]:
    """As JSON gives them back."""
    given = {"version": _VERSION, "source": repr(source), "files": fingerprint(source)} | asdict(settings)
    return json.loads(json.dumps(given))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _read_parts(source: Source, work: Path, workers: int, progress: Progress) -> list[Part]:
    found = [done_part(work, number) for number in range(len(source.parts))]
    missing = [number for number, part in enumerate(found) if part is None]
    what = "reading rows"
    progress(what, sum(part.samples for part in found if part), None)
    if workers == 1 or len(missing) < 2:
        for number in missing:
            found[number] = read_part(source, work, number, lambda rows: progress(what, rows, None))
    else:
        for number, part in _in_processes(partial(read_part, source, work), missing, workers):
            found[number] = part
            progress(what, part.samples, None)
    return [part for part in found if part is not None]


def _in_processes(work: Callable[[Any], Any], jobs: Sequence[Any], workers: int) -> Iterator[tuple[Any, Any]]:
    """(job, result) as they end. The first error ends the work."""
    with worker_processes(workers) as pool:
        futures = {pool.submit(work, job): job for job in jobs}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _wrong(source: Source, settings: Settings, samples: int, faults: Sequence[str]) -> str:
    """Why nothing can be written; empty if it can."""
    if faults and not settings.skip_bad:
        return (
            f"{len(faults)} of {samples + len(faults)} records of {source.what} cannot be used; nothing was written. "
            "Mend them, or leave them out with --skip-bad:\n" + listed(faults, NAMED, between="\n", before_more="\n")
        )
    if len(faults) > allowed_of(settings.max_bad, samples + len(faults)):
        return (
            f"{len(faults)} of {samples + len(faults)} records of {source.what} cannot be used, more than --max-bad "
            f"{settings.max_bad:g} allows to skip; nothing was written. Repair them, or raise --max-bad:\n"
            + listed(faults, NAMED, between="\n", before_more="\n")
        )
    if samples <= settings.held_out:
        first = f", such as: {faults[0]}" if faults else ""
        return (
            f"{source.what} has {plural(samples, 'record')} that can be used{first}: hold out fewer, not "
            f"{settings.held_out}"
            if settings.held_out
            else f"{source.what} has no record that can be used{first}"
        )
    return ""


def _planned(to: Path, rows: Sequence[np.ndarray], settings: Settings) -> tuple[list[_Shard], dict[str, int]]:
    """The shards, and the samples of `train` and `held_out`."""
    lines = np.concatenate(
        [
            np.stack([np.full(len(own), part), own["at"], own["length"], own["line"]], axis=1)
            for part, own in enumerate(rows)
        ]
    )
    sizes = np.concatenate([own["bytes"] for own in rows])
    total, held = len(sizes), settings.held_out
    aside = np.zeros(total, dtype=bool)
    aside[[(2 * at + 1) * total // (2 * held) for at in range(held)]] = True
    planned, counts = [], {}
    for name, own in (("train", np.flatnonzero(~aside)), ("held_out", np.flatnonzero(aside))):
        if not len(own):
            continue
        counts[name] = len(own)
        order = own[GlobalOrder(len(own), settings.seed or 0, settings.seed is not None).rows(np.arange(len(own)))]
        for number, (start, end) in enumerate(_cuts(sizes[order], settings)):
            path = to / name / f"{name}-{number:06d}.tar"
            planned.append(
                _Shard(path, start, lines[order[start:end]], shard_bytes(int(sizes[order[start:end]].sum())))
            )
    return planned, counts


def _cuts(sizes: np.ndarray, settings: Settings) -> Iterator[tuple[int, int]]:
    """(first, behind the last) sample of each shard."""
    ends = np.cumsum(sizes)
    start, before = 0, 0
    while start < len(sizes):
        most = int(np.searchsorted(ends, before + settings.shard_bytes - shard_bytes(0), side="right"))
        end = min(max(most, start + 1), start + settings.per_shard, len(sizes))
        yield start, end
        start, before = end, int(ends[end - 1])


def _write_shards(planned: Sequence[_Shard], work: Path, workers: int, progress: Progress) -> None:
    missing = [shard for shard in planned if not (shard.path.exists() and shard.path.stat().st_size == shard.bytes)]
    what, total = "writing samples", sum(len(shard.lines) for shard in planned)
    progress(what, total - sum(len(shard.lines) for shard in missing), total)
    if workers == 1 or len(missing) < 2:
        for shard in missing:
            _write_shard(work, shard)
            progress(what, len(shard.lines), total)
        return
    for shard, _ in _in_processes(partial(_write_shard, work), missing, workers):
        progress(what, len(shard.lines), total)


def _write_shard(work: Path, shard: _Shard) -> None:
    with Contents(work) as contents, shard_file(shard.path) as file:
        for row, line in enumerate(shard.lines.tolist(), shard.first):
            contents.copy(file, row, *line)


def _notes(parts: Sequence[Part], rows: Sequence[np.ndarray]) -> list[str]:
    notes = []
    for what in sorted({what for part in parts for what in part.nulls}):
        counts, firsts = zip(*(part.nulls[what] for part in parts if what in part.nulls), strict=True)
        notes.append(f"{sum(counts)} {what} are left out, such as {firsts[0]}")
    rules: Counter[str] = Counter()
    for part in parts:
        rules.update(part.rules)
    notes += [f"{plural(count, 'record')} {rule}" for rule, count in rules.items()]
    names = np.concatenate([own["name"] for own in rows])
    names = names[names != 0]
    if again := len(names) - len(np.unique(names)):
        notes.append(f"{again} have the name (id or key) of an earlier one: all are kept, since samples are numbered")
    return notes
