"""How many tokens every sample takes in the sequence: counted once, kept beside the shards' catalogue.

The plan of a step needs the lengths of all its samples on every rank, also of those that never read text. So every
text is tokenized once before a run: `shards.KEY.mimo-lengths` (`data.catalogue.lengths_file`) has the tokens of each
sample of a folder, media included, cut at `sequence_length`. KEY is a hash of whatever the lengths follow from beside
the shards: vocabulary, chat template and placeholders, the tokens of the media, the cut, bounds. A run with another key
counts again, into a file of its own; one shard that has changed is counted alone. What is counted is safe at once: it
lies in a journal until all is, and a build that was killed goes on where it was.

The length of a bad sample is that of its stand-in: its placeholders.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import pickle
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, as_completed
from contextlib import ExitStack, contextmanager
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from data.errors import DataError
from data.index.journal import Busy, Journal, opened_journal, remove_journal
from data.index.lengths_file import STAMP, LengthsFile, Part, load_lengths, write_lengths
from data.index.locations import by_folder, catalogue_path
from data.index.shard_list import Found
from data.prefetch import expect_texts
from data.processes import worker_processes
from data.records.members import Fields
from data.storage.files import cannot_write
from data.storage.url import Place
from data.text_format import plural

if TYPE_CHECKING:
    from data.samples.dataset import Dataset

_log = logging.getLogger(__name__)

_AHEAD = 256  # records of a remote shard that are announced together
_FEW = 20_000  # samples that are counted before processes for it would have started
_LEFT = 30 * 24 * 3600.0  # seconds after which nobody is taken to go on with a count of another key
_PAUSE = 0.1  # seconds between looks whether another process still counts

Count = Callable[[Sequence[int]], Iterator[tuple[int, np.ndarray, bytes]]]
"""Numbers of shards -> (number, `STAMP`, int32 lengths) of each, as they are done."""


class Counted(NamedTuple):
    """A shard whose texts have been counted; no samples: another process still counts those of its folder."""

    shard: Place
    samples: int
    here: bool
    """Whether this process has done it, now: not another one, and not one that was killed before."""


class TextLengths:
    """The lengths of a dataset's samples: which are known, and how the others become known."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        stamps, numbers = dataset.stamps(), dict[tuple[str, str], list[int]]()
        names: dict[tuple[str, str], list[str]] = {}
        for key, of_source in dataset.lengths_keys():
            of_shards = dataset.shards[of_source.start : of_source.stop]
            for at in by_folder(of_shards):
                place = key, str(of_shards[at[0]].parent)
                numbers.setdefault(place, []).extend(of_source.start + one for one in at)
                names.setdefault(place, []).extend(of_shards[one].name for one in at)
        self._folders = []
        for place, of_folder in numbers.items():
            first, suffix = dataset.shards[of_folder[0]], f".{place[0]}.mimo-lengths"
            paths = [catalogue_path(first, dataset.cache_dir, writable, suffix) for writable in (False, True)]
            folder = first.parent if isinstance(first, Path) else None
            self._folders.append(_Folder(paths, folder, names[place], np.array(of_folder), stamps[of_folder]))

    def missing(self) -> list[int]:
        """Numbers of the shards that have not been counted yet."""
        return sorted(number for folder in self._folders for number in folder.missing())

    def serve(self) -> None:
        """Gives the lengths to the dataset, for `Dataset.plan_step`. Raises DataError if some are missing."""
        if missing := self.missing():
            raise DataError(f"not counted: the texts of {plural(len(missing), 'shard')}, {self._shard(missing[0])}")
        counts = [self._dataset.samples_of(shard) for shard in range(len(self._dataset.shards))]
        if len(self._folders) == 1 and (mapped := self._folders[0].mapped()) is not None:
            self._dataset.lengths = mapped
            return
        lengths, begins = np.empty(sum(counts), dtype=np.int32), np.cumsum([0, *counts])
        for folder in self._folders:
            for shard, own in folder.lengths():
                lengths[begins[shard] : begins[shard + 1]] = own
        self._dataset.lengths = lengths

    def build(
        self, open_shard: Callable[[Place, Fields], Dataset] | None = None, processes: int | None = None
    ) -> Generator[Counted]:
        """Counts what is missing, and says of each shard that it is done.

        Args:
            open_shard: opens one shard, by its `data.fields`, as this dataset does; it is called in other processes,
                and can be pickled. None: everything is counted in this one.
            processes: to count in; None: as many as this one may use, if there is work for them.

        Raises:
            What `Dataset.length_of` raises, and DataError: the file cannot be written.
        """
        missing = self.missing()
        if processes is None:
            few = sum(self._dataset.samples_of(shard) for shard in missing) < _FEW
            processes = 1 if few else len(os.sched_getaffinity(0))
        processes = min(processes, len(missing))
        if open_shard is None or processes <= 1:
            yield from self._build(self._counted_here)
            return
        with worker_processes(processes) as pool:
            opener, fields_of = pickle.dumps(open_shard), self._dataset.fields_of
            job_of = cache(lambda shard: pool.submit(_count_one, opener, self._shard(shard), fields_of(shard)))
            for shard in missing:  # of all folders: one of few shards keeps no process waiting
                job_of(shard)
            yield from self._build(partial(_counted_in, job_of))

    def _build(self, count: Count) -> Generator[Counted]:
        for folder in self._folders:
            while folder.missing():
                try:
                    for shard, samples, here in folder.build(count):
                        yield Counted(self._shard(shard), samples, here)
                    break
                except Busy:
                    yield Counted(self._shard(folder.missing()[0]), 0, False)
                    time.sleep(_PAUSE)
            folder.remove_journals()

    def _counted_here(self, shards: Sequence[int]) -> Iterator[tuple[int, np.ndarray, bytes]]:
        stamps = self._dataset.stamps()
        for shard in shards:
            yield shard, stamps[shard], _lengths_of(self._dataset, shard)

    def _shard(self, shard: int) -> Place:
        return self._dataset.shards[shard]


def _counted_in(
    job_of: Callable[[int], Future[tuple[np.ndarray, bytes]]], shards: Sequence[int]
) -> Iterator[tuple[int, np.ndarray, bytes]]:
    jobs = {job_of(shard): shard for shard in shards}
    for job in as_completed(jobs):
        yield jobs[job], *job.result()


class _Folder:
    """Shards of one folder that are counted alike.

    Args:
        paths: where their file may be; the last is where it is written.
        folder: of the shards; None: nobody can look there.
        names: of the shards; numbers: int64, in the dataset, each shard maybe more than once; stamps: `STAMP`.
    """

    def __init__(
        self, paths: Sequence[Path], folder: Path | None, names: list[str], numbers: np.ndarray, stamps: np.ndarray
    ) -> None:
        self._paths, self._path, self._folder = list(dict.fromkeys(paths)), paths[-1], folder
        self._names, self._numbers, self._stamps = names, numbers, stamps
        self._files: list[LengthsFile] | None = None
        self._found = Found[LengthsFile].of_none(len(names))

    def missing(self) -> list[int]:
        """Numbers of the shards whose lengths are not in a file."""
        if self._files is None:
            self._load()
        return self._numbers[self._found.missing].tolist()

    def mapped(self) -> np.ndarray | None:
        """The lengths as they stand in the file, if they are those of all shards of a dataset, one behind the other."""
        found = self._found
        if len(found.files) != 1 or (self._numbers != np.arange(len(self._numbers))).any():
            return None
        (file,), counts = found.files, self._stamps["samples"]
        firsts, ends = file.firsts[found.row], np.cumsum(counts)
        if (firsts != firsts[0] + ends - counts).any():
            return None
        return file.lengths[int(firsts[0]) : int(firsts[0] + ends[-1])]

    def lengths(self) -> Iterator[tuple[int, np.ndarray]]:
        """(number, lengths) of each shard; none is missing."""
        found = self._found
        for number, file, row in zip(self._numbers.tolist(), found.file.tolist(), found.row.tolist(), strict=True):
            yield number, found.files[file].of(row)

    def build(self, count: Count) -> Generator[tuple[int, int, bool]]:
        """Counts what is missing and writes the file; gives (number, samples, whether they were counted here and now)
        of each shard that is done.

        Raises:
            Busy: another process does it.
            DataError: the file cannot be written.
        """
        with ExitStack() as stack:
            with self._writing():
                journal = stack.enter_context(opened_journal(self._journal, wait=False))
            missing = {self._names[at]: at for at in np.flatnonzero(self._found.missing).tolist()}
            self._load()  # another process may have worked meanwhile
            records = self._of_journal(journal, missing)
            for name, at in missing.items():
                if name in records or not self._found.missing[at]:
                    yield int(self._numbers[at]), int(self._stamps["samples"][at]), False
            left = [at for name, at in missing.items() if name not in records and self._found.missing[at]]
            places = {int(self._numbers[at]): at for at in left}
            for number, stamp, lengths in count([*places]):
                name = self._names[places[number]]
                with self._writing():
                    journal.append(json.dumps([name, stamp.tobytes().hex()]).encode(), lengths)
                records[name] = stamp, len(journal) - 1
                yield number, len(lengths) // 4, True
            if records:
                self._save(journal, records)
        self._load()

    def remove_journals(self) -> None:
        """Removes what builds have left that were killed: between the file and the end, of this folder; and what nobody
        has gone on with for a long time, be it of other shards, or of another tokenizer or template."""
        if self._is_in_file():
            remove_journal(self._journal)
        before, _, _ = self._path.name.partition(".mimo-lengths")
        folder_name = before.rpartition(".")[0]
        for other in self._path.parent.glob(f"{glob.escape(folder_name)}.*.mimo-lengths.journal"):
            remove_journal(other, unused_seconds=_LEFT)

    def _is_in_file(self) -> bool:
        """Whether all that the journal has is in the file: of a dataset with other shards of this folder it may not."""
        try:
            with self._journal.open("rb") as file:
                journal = Journal(file.fileno())
                counted = dict(json.loads(journal[number][0]) for number in range(len(journal)))
        except (OSError, ValueError, TypeError):  # none, or of another version of this program
            return False
        saved = load_lengths(self._path)
        stamps = dict(zip(saved.names, saved.stamps, strict=True)) if saved else {}
        return all(name in stamps and stamps[name].tobytes().hex() == stamp for name, stamp in counted.items())

    @property
    def _journal(self) -> Path:
        return self._path.with_name(self._path.name + ".journal")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise cannot_write("text lengths", self._path, error) from error

    def _load(self) -> None:
        found = Found[LengthsFile].of_none(len(self._names))
        self._files = [file for path in self._paths if (file := load_lengths(path)) is not None]
        for file in self._files:
            rows = file.numbers_of(self._names)
            which = np.flatnonzero(found.missing & (rows >= 0))
            which = which[file.stamps[rows[which]] == self._stamps[which]]
            if len(which) and not file.are_all_whole():
                broken = [at for at in which.tolist() if not file.is_whole(int(rows[at]))]
                for at in broken:
                    _log.warning(
                        "%s: the text lengths of %s are damaged, and counted again", file.path, self._names[at]
                    )
                which = which[~np.isin(which, broken)]
            found.take(file, rows, which)
        self._found = found

    def _of_journal(self, journal: Journal, missing: dict[str, int]) -> dict[str, tuple[np.ndarray, int]]:
        """Name -> stamp, and the record with the lengths: of missing shards, and of those of this folder that the
        dataset lacks, which a build of more shards had begun: the journal goes with this one."""
        records, own = dict[str, tuple[Any, int]](), set(self._names)
        for number in range(len(journal)):
            head, body = journal[number]
            try:
                name, stamp = json.loads(head)
                (found,) = np.frombuffer(bytes.fromhex(stamp), dtype=STAMP)
            except (ValueError, TypeError):  # of another version of this program
                continue
            if name in missing:
                is_wanted = found.item() == self._stamps[missing[name]].item()
            else:
                is_wanted = name not in own and self._may_be_there(name)
            if is_wanted and len(body) == 4 * int(found["samples"]):
                records[name] = found, number
        return records

    def _save(self, journal: Journal, records: dict[str, tuple[np.ndarray, int]]) -> None:
        """Writes the file again: what was counted, and what there was of other shards that still are."""
        parts = {name: Part(name, stamp, partial(_body_of, journal, at)) for name, (stamp, at) in records.items()}
        wanted = {name: at for at, name in enumerate(self._names)}
        for file in self._files or ():
            for row, name in enumerate(file.names):
                at = wanted.get(name)
                if at is None:
                    stays = file.path == self._path and self._may_be_there(name)
                else:
                    stays = file.stamps[row] == self._stamps[at]
                if stays and name not in parts and file.is_whole(row):
                    parts[name] = Part(name, file.stamps[row], partial(_bytes_of, file, row))
        write_lengths(self._path, parts.values())

    def _may_be_there(self, name: str) -> bool:
        """Whether a shard that is not of the dataset is in the folder."""
        return self._folder is None or (self._folder / name).exists()


def _body_of(journal: Journal, record: int) -> bytes:
    return journal[record][1]


def _bytes_of(file: LengthsFile, row: int) -> bytes:
    return file.of(row).tobytes()


_opener = lru_cache(maxsize=1)(pickle.loads)  # one for all shards that a process counts: it may hold a tokenizer


def _count_one(opener: bytes, path: Place, fields: Fields) -> tuple[np.ndarray, bytes]:
    """`STAMP` of a shard and int32 lengths. At module level, so that worker processes can find it."""
    dataset = _opener(opener)(path, fields)
    try:
        (stamp,) = dataset.stamps()
        return stamp, _lengths_of(dataset, 0)
    finally:
        dataset.close()


def _lengths_of(dataset: Dataset, shard: int) -> bytes:
    """Tokenizes every text of a shard; int32."""
    rows = dataset.samples_of(shard)
    lengths = np.empty(rows, dtype=np.int32)
    for row in range(rows):
        if row % _AHEAD == 0:
            expect_texts(dataset, shard, range(row, min(row + 2 * _AHEAD, rows)))
        lengths[row] = dataset.length_of(shard, row)
    return lengths.tobytes()


def require_planned(found: int, planned: int, where: tuple[Place, str]) -> None:
    """Raises DataError for a text that is not as long as the plan of its step says: its row may have no room for it."""
    if found != planned:
        shard, key = where
        raise DataError(
            f"{shard}, key {key!r}: its text has {found} tokens, and had {planned} when texts were counted: the "
            "tokenizer or the shard has changed in a way that does not show. Remove the *.mimo-lengths beside the "
            "shards, or in data.cache_dir, and start again"
        )
