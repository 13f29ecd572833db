"""The catalogue of a run: the indexes of its shards, each compared with its shard when it is opened."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np

from data.errors import DataError
from data.index.folder_file import by_folder
from data.index.index_file import STAMP, UNIT, IndexFile, Located, Part
from data.index.indexing import FolderIndex, Progress
from data.index.shard_index import MEMBER, SAMPLE, Codes, Rows, ShardIndex
from data.storage.files import RETRIES, ShardVersion
from data.storage.url import Place, Url, place_of


class Catalogue:
    """The indexes of shards, in order.

    Attributes:
        counts: int64 [shards], samples of each.
        errors: shard -> why it has no index; only if not opened as `strict`.
    """

    def __init__(self, shards: Sequence[Place], located: Located, errors: Mapping[int, DataError]) -> None:
        self._shards, self.errors = shards, dict(errors)
        self._files, self._file, self._row = located.files, located.file, located.row
        self.counts, self._starts = np.zeros(len(shards), dtype=np.int64), np.zeros(len(shards), dtype=np.int64)
        self._checked = np.zeros(len(shards), dtype=bool)
        for number, file in enumerate(self._files):
            of_file = self._file == number
            rows = file.table[self._row[of_file]]
            self.counts[of_file], self._starts[of_file] = rows["samples"], rows["at"]

    def __len__(self) -> int:
        return len(self._shards)

    def version(self, shard: int) -> ShardVersion:
        """Return the indexed version of a shard."""
        return self._files[self._file[shard]].version(int(self._row[shard]))

    def contents(self) -> tuple[list[int], list[str]]:
        """Return the bytes and `ShardVersion.content` of all shards."""
        stamps = self.stamps()
        return stamps["size"].tolist(), stamps["content"].astype("U32").tolist()

    def stamps(self) -> np.ndarray:
        """Return `STAMP` of all shards."""
        stamps = np.zeros(len(self), dtype=STAMP)
        for number, file in enumerate(self._files):
            of_file = self._file == number
            stamps[of_file] = file.stamps(self._row[of_file])
        return stamps

    def index(self, shard: int) -> ShardIndex:
        """Return the index of a shard. Raises DataError if its part is damaged, or its error in `errors`."""
        if shard in self.errors:
            raise self.errors[shard]
        self._check(shard)
        file = self._files[self._file[shard]]
        return _index_of(file.part(int(self._row[shard])), self._shards[shard], file)

    def rows(self, shards: np.ndarray, rows: np.ndarray) -> Rows:
        """Return samples and members of many rows, of any shards. Raises DataError as `index`."""
        for shard in np.unique(shards[~self._checked[shards]]).tolist():
            self._check(shard)
        of_shards = self._file[shards], self._row[shards], self._starts[shards], self.counts[shards]
        return Rows(self._files, of_shards, rows)

    def _check(self, shard: int) -> None:
        if self._checked[shard]:
            return
        file, row = self._files[self._file[shard]], int(self._row[shard])
        if file.is_small or file.is_part_intact(row):
            fault = _part_fault(file.part(row), self._shards[shard], file)
        else:
            fault = "another checksum"
        if fault:
            try:
                file.path.unlink(missing_ok=True)
                remedy = "It was removed: start again, and it is built anew"
            except OSError as error:
                remedy = (
                    f"It cannot be removed ({error.strerror}): remove it, or set data.cache_dir to a folder that can "
                    "be written, and it is built anew"
                )
            raise DataError(f"{file.path}: the index is damaged where it has {self._shards[shard]} ({fault}). {remedy}")
        self._checked[shard] = True


def open_catalogue(
    shards: Sequence[Place],
    cache_dir: str | os.PathLike[str] | None = None,
    retries: int = RETRIES,
    *,
    processes: int = 1,
    progress: Progress | None = None,
    strict: bool = True,
) -> Catalogue:
    """Open the indexes of shards. Missing, outdated and damaged ones are built and saved first.

    Several processes may call this at once.

    Args:
        retries: `data.read_retries`: retries after an I/O error.
        processes: number of processes that build. More than one are spawned, which requires an importable main module
            (`if __name__ == "__main__"`).
        progress: None: log messages.
        strict: raise the first error of a shard immediately.

    Raises:
        ShardError: a shard is no file, compressed, truncated or damaged.
        ReadError: one cannot be read.
        DataError: the file cannot be written.
    """
    located, errors = Located.none(len(shards)), dict[int, DataError]()
    for numbers in by_folder(shards):
        of_folder = [shards[number] for number in numbers]
        folder = FolderIndex(of_folder, cache_dir, retries, processes, progress, strict)
        located.add(folder.opened(), numbers)
        errors |= {numbers[shard]: error for shard, error in folder.errors.items()}
    return Catalogue(shards, located, errors)


def open_index(
    shard: str | os.PathLike[str] | Url, cache_dir: str | os.PathLike[str] | None = None, retries: int = RETRIES
) -> ShardIndex:
    """Open the index of one shard. See `open_catalogue`."""
    return open_catalogue([place_of(shard)], cache_dir, retries).index(0)


def _part_fault(part: Part, shard: Place, file: IndexFile) -> str:
    samples, members, keys = part.rows
    length = (samples + 1) * SAMPLE.itemsize + members * MEMBER.itemsize + keys
    is_aligned = file.table["at"][file.row_of[part.name]] % UNIT == 0
    if min(part.rows) < 0 or len(part.body) != length + -length % UNIT or len(part.codes) != 3 or not is_aligned:
        return "rows of another length"
    return _index_of(part, shard, file).fault()


def _index_of(part: Part, path: Place, file: IndexFile) -> ShardIndex:
    samples, members, keys = part.rows
    ends = np.cumsum([0, (samples + 1) * SAMPLE.itemsize, members * MEMBER.itemsize, keys]).tolist()
    return ShardIndex(
        path=path,
        version=part.version,
        codes=Codes(*part.codes),
        samples=np.frombuffer(part.body[: ends[1]], dtype=SAMPLE),
        all_members=np.frombuffer(part.body[ends[1] : ends[2]], dtype=MEMBER),
        packed_keys=bytes(part.body[ends[2] : ends[3]]),
        kept_in=file.path,
    )
