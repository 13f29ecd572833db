"""The catalogue of a run: the indexes of its shards, each compared with its shard when it is opened."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np

from data.errors import DataError
from data.index.index_file import STAMP, IndexFile, Located, by_folder
from data.index.indexing import FolderIndex, Progress
from data.index.shard_index import MEMBER, SAMPLE, Codes, Rows, ShardIndex
from data.storage.files import RETRIES, ShardVersion
from data.storage.url import Place


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
        """Return the index of a shard. Raises its error in `errors`."""
        if shard in self.errors:
            raise self.errors[shard]
        part = self._files[self._file[shard]].part(int(self._row[shard]))
        samples, members, keys = part.rows
        ends = np.cumsum([(samples + 1) * SAMPLE.itemsize, members * MEMBER.itemsize, keys]).tolist()
        return ShardIndex(
            path=self._shards[shard],
            version=part.version,
            codes=Codes(*part.codes),
            samples=np.frombuffer(part.body[: ends[0]], dtype=SAMPLE),
            all_members=np.frombuffer(part.body[ends[0] : ends[1]], dtype=MEMBER),
            packed_keys=bytes(part.body[ends[1] : ends[2]]),
        )

    def rows(self, shards: np.ndarray, rows: np.ndarray) -> Rows:
        """Return samples and members of many rows, int64, of `shards`, int64."""
        samples, counts = np.zeros(len(rows), dtype=SAMPLE), np.zeros(len(rows), dtype=np.int64)
        names, kinds, of_files = list[str](), list[str](), []
        for number, file in enumerate(self._files):
            places = np.flatnonzero(self._file[shards] == number)
            of_file = shards[places]
            starts = self._starts[of_file] + rows[places] * SAMPLE.itemsize
            samples[places] = _records(file, starts, SAMPLE)
            firsts = samples["first_member"][places]
            counts[places] = _records(file, starts + SAMPLE.itemsize, SAMPLE)["first_member"] - firsts
            members_at = self._starts[of_file] + (self.counts[of_file] + 1) * SAMPLE.itemsize + firsts * MEMBER.itemsize
            first_codes = np.cumsum([len(names), *(len(extensions) for extensions, *_ in file.codes)])
            of_files.append((file, places, members_at, first_codes[file.table["codes"][self._row[of_file]]]))
            for extensions, of_extensions, _ in file.codes:
                names += extensions
                kinds += of_extensions
        ends = np.concatenate([[0], np.cumsum(counts)])
        members = np.zeros(int(ends[-1]), dtype=MEMBER)
        for file, places, members_at, codes in of_files:
            records = _records(file, _spread(members_at, counts[places], MEMBER.itemsize), MEMBER)
            records["code"] += np.repeat(codes, counts[places]).astype(np.int32)
            members[_spread(ends[places], counts[places])] = records
        return Rows(samples, ends, members, names, kinds)


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


def _records(file: IndexFile, starts: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the records at byte offsets of a file, which are multiples of 8."""
    words = file.bytes[: len(file.bytes) // 8 * 8].view("<i8")
    return words[starts[:, None] // 8 + np.arange(dtype.itemsize // 8)].view(dtype).reshape(-1)


def _spread(starts: np.ndarray, counts: np.ndarray, step: int = 1) -> np.ndarray:
    """Return start, start + step, ..., `counts` numbers for each start, concatenated."""
    ends = np.cumsum(counts)
    within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    return np.repeat(starts, counts) + step * within
