"""Sequence tokens of every sample, which plans need on every rank: counted once, stored next to the catalogue.

`shards.KEY.mimo-lengths` (`index_file`) has those of a folder, media included, cut at `sequence_length`, for each
answer of a sample. KEY is a hash of everything else that determines lengths: vocabulary, chat template, placeholders,
media tokens, the cut, bounds, the form of records.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from data.errors import DataError, ShardError
from data.index import index_file
from data.index.index_file import FolderFile, IndexFile, Part, by_folder
from data.records.members import Fields
from data.storage.files import Busy, ShardVersion
from data.storage.url import Place
from data.text_format import plural
from data.workers import worker_processes

if TYPE_CHECKING:
    from data.samples.shard_dataset import ShardDataset

_AHEAD = 256  # records of a remote shard that are announced together
_FEW = 20_000  # samples that are counted before worker processes would have started
_POLL_SECONDS = 0.1  # between checks for another process that counts

Lengths = tuple[ShardVersion, bytes]
"""The version of a counted shard, and the int32 lengths of its samples, [samples, answers]."""
Count = Callable[[Sequence[int]], Iterator[tuple[int, Lengths]]]
"""Shard indexes -> (index, lengths) of each, as they are done."""


class Counted(NamedTuple):
    """A counted shard. `samples` is 0 while another process counts its folder."""

    shard: Place
    samples: int
    here: bool
    """True if this process has just counted it, rather than another or an earlier one."""


class TextLengths:
    """The lengths of a dataset's samples: loads known ones and counts the others."""

    def __init__(self, dataset: ShardDataset) -> None:
        self._dataset = dataset
        numbers: dict[tuple[str, str], list[int]] = {}
        for key, of_source in dataset.lengths_keys():
            shards = [dataset.shards[number] for number in of_source]
            for of_folder in by_folder(shards):
                folder = str(shards[of_folder[0]].parent)
                numbers.setdefault((key, folder), []).extend(of_source.start + number for number in of_folder)
        stamps = dataset.catalogue.stamps()
        self._folders = [_Folder(dataset, key, of_folder, stamps[of_folder]) for (key, _), of_folder in numbers.items()]

    def missing(self) -> list[int]:
        """Return the indexes of uncounted shards."""
        return sorted(number for folder in self._folders for number in folder.missing())

    def serve(self) -> None:
        """Give the lengths to the dataset, for `ShardDataset.plan_step`. Raises DataError if some are missing."""
        if missing := self.missing():
            example = self._dataset.shards[missing[0]]
            raise DataError(f"not counted: the texts of {plural(len(missing), 'shard')}, for example {example}")
        answers = self._dataset.answers
        shape = (-1, answers) if answers > 1 else (-1,)
        if len(self._folders) == 1 and (mapped := self._folders[0].mapped()) is not None:
            self._dataset.lengths = mapped.reshape(shape)
            return
        counts = [answers * self._dataset.samples_of(shard) for shard in range(len(self._dataset.shards))]
        lengths, begins = np.empty(sum(counts), dtype=np.int32), np.cumsum([0, *counts])
        for folder in self._folders:
            for shard, of_shard in folder.lengths():
                lengths[begins[shard] : begins[shard + 1]] = of_shard
        self._dataset.lengths = lengths.reshape(shape)

    def build(
        self, open_shard: Callable[[Place, Fields], ShardDataset] | None = None, processes: int | None = None
    ) -> Generator[Counted]:
        """Count missing shards, and yield each when it is done. Raises the errors of `ShardDataset.lengths_of`.

        Args:
            open_shard: opens one shard with its `data.fields` like this dataset; pickled and called in worker
                processes. None: count in this process.
            processes: number of processes; None: as many as are available, if there is enough work.

        Raises:
            DataError: the file cannot be written.
        """
        missing = self.missing()
        if processes is None:
            is_little = sum(self._dataset.samples_of(shard) for shard in missing) < _FEW
            processes = 1 if is_little else len(os.sched_getaffinity(0))
        processes = min(processes, len(missing))
        if open_shard is None or processes <= 1:
            yield from self._build(self._count_here)
            return
        with worker_processes(processes) as pool:
            opener, dataset = pickle.dumps(open_shard), self._dataset
            job_of = cache(
                lambda shard: pool.submit(_count_shard, opener, dataset.shards[shard], dataset.fields_of(shard))
            )
            for shard in missing:  # all folders at once, so that small ones keep no process waiting
                job_of(shard)
            yield from self._build(partial(_count_in, job_of))

    def _build(self, count: Count) -> Generator[Counted]:
        for folder in self._folders:
            while folder.missing():
                try:
                    yield from folder.build(count)
                except Busy:
                    yield Counted(self._dataset.shards[folder.missing()[0]], 0, False)
                    time.sleep(_POLL_SECONDS)

    def _count_here(self, shards: Sequence[int]) -> Iterator[tuple[int, Lengths]]:
        for shard in shards:
            yield shard, (self._dataset.version(shard), _lengths_of(self._dataset, shard))


class _Folder:
    """Shards of one folder with the same key: their indexes in the dataset, with repetitions."""

    def __init__(self, dataset: ShardDataset, key: str, numbers: list[int], stamps: np.ndarray) -> None:
        self._dataset, self._shards = dataset, [dataset.shards[number] for number in numbers]
        self._numbers, self._stamps, self._bytes = np.array(numbers), stamps, 4 * dataset.answers
        suffix = f".{key}.mimo-lengths"
        self._file = FolderFile(self._shards, dataset.cache_dir, suffix, "text lengths")
        self._is_loaded = False

    def missing(self) -> list[int]:
        """Return the indexes of shards without lengths in a file."""
        if not self._is_loaded:
            self._load()
        return self._numbers[self._file.located.missing].tolist()

    def mapped(self) -> np.ndarray | None:
        """Return the lengths mapped from the file, if they cover a dataset's shards in order."""
        located, ends = self._file.located, np.cumsum(self._stamps["samples"])
        if len(located.files) != 1 or (self._numbers != np.arange(len(self._numbers))).any():
            return None
        firsts = located.files[0].table["at"][located.row]
        if (firsts != firsts[0] + self._bytes * (ends - self._stamps["samples"])).any():
            return None
        return located.files[0].bytes[int(firsts[0]) : int(firsts[0] + self._bytes * ends[-1])].view("<i4")

    def lengths(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (index, lengths [samples * answers]) of each shard; none may be missing."""
        located = self._file.located
        for number, file, row in zip(self._numbers.tolist(), located.file, located.row, strict=True):
            yield number, np.frombuffer(located.files[file].body(row), dtype="<i4")

    def build(self, count: Count) -> Generator[Counted]:
        """Count missing shards, write the file, and yield each shard when it is done.

        Raises:
            Busy: another process is counting.
            DataError: the file cannot be written.
        """
        with self._file.lock(wait=False):
            before = self._file.located.missing
            self._load()  # another process may have worked meanwhile
            for at in np.flatnonzero(before & ~self._file.located.missing).tolist():
                yield Counted(self._shards[at], int(self._stamps["samples"][at]), False)
            # A repeated shard is counted once.
            missing = {self._shards[at].name: at for at in np.flatnonzero(self._file.located.missing).tolist()}
            place_of = {int(self._numbers[at]): at for at in missing.values()}
            new: dict[str, Part] = {}
            saved = time.monotonic()
            try:
                for number, (version, lengths) in count([*place_of]):
                    shard, samples = self._shards[place_of[number]], len(lengths) // self._bytes
                    if replace(version, ctime_ns=0) != replace(self._dataset.version(number), ctime_ns=0):
                        raise ShardError(f"{shard}: the shard changed while its texts were counted. Start again.")
                    new[shard.name] = Part(shard.name, version, lengths, (samples, 0, 0))
                    if time.monotonic() - saved > index_file.SAVE_SECONDS:
                        self._file.save(new, {})
                        new.clear()
                        saved = time.monotonic()
                    yield Counted(shard, samples, True)
            finally:
                if new:
                    self._file.save(new, {})
        self._load()

    def _load(self) -> None:
        self._file.load(self._current)
        self._is_loaded = True

    def _current(self, file: IndexFile, rows: np.ndarray, which: np.ndarray) -> np.ndarray:
        table = file.table[rows[which]]
        same = (file.stamps(rows[which]) == self._stamps[which]) & (table["bytes"] == self._bytes * table["samples"])
        return which[same]


def _count_in(job_of: Callable[[int], Future[Lengths]], shards: Sequence[int]) -> Iterator[tuple[int, Lengths]]:
    jobs = {job_of(shard): shard for shard in shards}
    for job in as_completed(jobs):
        yield jobs[job], job.result()


_opener = lru_cache(maxsize=1)(pickle.loads)  # one per process: it may hold a tokenizer


def _count_shard(opener: bytes, shard: Place, fields: Fields) -> Lengths:
    """Count a shard; at module level for pickling."""
    dataset = _opener(opener)(shard, fields)
    try:
        return dataset.version(0), _lengths_of(dataset, 0)
    finally:
        dataset.close()


def _lengths_of(dataset: ShardDataset, shard: int) -> bytes:
    rows = dataset.samples_of(shard)
    lengths = np.empty((rows, dataset.answers), dtype=np.int32)
    for row in range(rows):
        if row % _AHEAD == 0:
            dataset.expect_texts(shard, range(row, min(row + 2 * _AHEAD, rows)))
        lengths[row] = dataset.lengths_of(shard, row)
    return lengths.tobytes()
