"""The catalogue of a run: the indexes of all its shards, each compared with its shard when it is opened."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np

from data.errors import DataError
from data.index.file import CatalogueFile
from data.index.folder import Folder, Progress
from data.index.lengths_file import STAMP
from data.index.locations import by_folder
from data.index.rows import Rows
from data.index.shard_index import ShardIndex
from data.index.shard_list import Found
from data.storage.files import RETRIES, ShardVersion
from data.storage.url import Place, Url, place_of


class Catalogue:
    """The indexes of shards, in their order.

    Attributes:
        counts: int64 [shards], samples of each.
        errors: shard's number -> why it has no index; only of those that were opened not to be `strict`.
    """

    def __init__(self, shards: Sequence[Place], found: Found[CatalogueFile], errors: Mapping[int, DataError]) -> None:
        self._shards, self.errors = shards, dict(errors)
        self._files, self._file, self._row = found.files, found.file, found.row
        self.counts, self._starts = np.zeros(len(shards), dtype=np.int64), np.zeros(len(shards), dtype=np.int64)
        self._checked = np.zeros(len(shards), dtype=bool)
        for number, file in enumerate(self._files):
            own = self._file == number
            rows = file.table[self._row[own]]
            self.counts[own], self._starts[own] = rows["samples"], rows["at"]

    def __len__(self) -> int:
        return len(self._shards)

    def version(self, shard: int) -> ShardVersion:
        """What the shard was when it was indexed."""
        return self._files[self._file[shard]].version(int(self._row[shard]))

    def contents(self) -> tuple[list[int], list[str]]:
        """Of all shards, the bytes and `ShardVersion.content`."""
        table = np.zeros(len(self), dtype=[("size", "<i8"), ("content", "S32")])
        for number, file in enumerate(self._files):
            own = self._file == number
            for name in ("size", "content"):
                table[name][own] = file.table[name][self._row[own]]
        return table["size"].tolist(), table["content"].astype("U32").tolist()

    def stamps(self) -> np.ndarray:
        """Of all shards, `STAMP`."""
        stamps = np.zeros(len(self), dtype=STAMP)
        stamps["samples"] = self.counts
        for number, file in enumerate(self._files):
            own = self._file == number
            rows = self._row[own]
            for name in ("size", "mtime_ns", "content"):
                stamps[name][own] = file.table[name][rows]
            stamps["tag"][own] = file.hashed_tags()[rows]
        return stamps

    def index(self, shard: int) -> ShardIndex:
        """Raises DataError if the part of the shard is damaged, and what `errors` has."""
        if shard in self.errors:
            raise self.errors[shard]
        if not self._checked[shard]:
            self._check(shard)
        file = self._files[self._file[shard]]
        return file.part(int(self._row[shard])).index(self._shards[shard], file.path)

    def rows(self, shards: np.ndarray, rows: np.ndarray) -> Rows:
        """Samples and members of many rows at once, of any shards. Raises DataError as `index`."""
        for shard in np.unique(shards[~self._checked[shards]]).tolist():
            self._check(shard)
        of_shards = self._file[shards], self._row[shards], self._starts[shards], self.counts[shards]
        return Rows(self._files, of_shards, rows)

    def _check(self, shard: int) -> None:
        """When the part of a shard is first used."""
        file, row = self._files[self._file[shard]], int(self._row[shard])
        is_whole = file.is_checked_at_once or file.is_whole(row)
        fault = file.part(row).fault() if is_whole else "another checksum"
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
    """The indexes of shards; those that are absent, out of date or damaged are built and saved first. Several processes
    may call this at once.

    Args:
        retries: `data.read_retries`: times that a read is tried again after an I/O error.
        processes: to build in. More than one are spawned, which a program's main module has to be fit for (`if __name__
            == "__main__"`): else they wait for what this one does.
        progress: None: what takes long is told to the log.
        strict: raise the first error of a shard, when it is found.

    Raises:
        ShardError: a shard is no file, compressed, truncated or damaged.
        ReadError: one cannot be read.
        DataError: the file cannot be written.
    """
    found, errors = Found[CatalogueFile].of_none(len(shards)), dict[int, DataError]()
    for numbers in by_folder(shards):
        folder = Folder([shards[number] for number in numbers], cache_dir, retries, processes, progress, strict)
        found.add(folder.opened(), numbers)
        errors |= {numbers[at]: error for at, error in folder.errors.items()}
    return Catalogue(shards, found, errors)


def open_index(
    shard: str | os.PathLike[str] | Url, cache_dir: str | os.PathLike[str] | None = None, retries: int = RETRIES
) -> ShardIndex:
    """The index of one shard; as of `open_catalogue`."""
    return open_catalogue([place_of(shard)], cache_dir, retries).index(0)
