"""The catalogue of a run: the indexes of all its shards, each compared with its shard when it is opened."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np

from data.errors import DataError
from data.index.folder_file import by_folder
from data.index.index_file import STAMP, IndexFile, Located, Part
from data.index.indexing import FolderIndex, Progress
from data.index.shard_index import MEMBER, SAMPLE, Codes, ShardIndex
from data.storage.files import RETRIES, ShardVersion
from data.storage.url import Place, Url, place_of


class Catalogue:
    """The indexes of shards, in their order.

    Attributes:
        counts: int64 [shards], samples of each.
        errors: number of a shard -> why it has no index; only of those that were opened not to be `strict`.
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
            self._checked[of_file] = file.is_small

    def __len__(self) -> int:
        return len(self._shards)

    def version(self, shard: int) -> ShardVersion:
        """The version of the shard when it was indexed."""
        return self._files[self._file[shard]].version(int(self._row[shard]))

    def contents(self) -> tuple[list[int], list[str]]:
        """Bytes and `ShardVersion.content` of all shards."""
        stamps = self.stamps()
        return stamps["size"].tolist(), stamps["content"].astype("U32").tolist()

    def stamps(self) -> np.ndarray:
        """`STAMP` of all shards."""
        stamps = np.zeros(len(self), dtype=STAMP)
        for number, file in enumerate(self._files):
            of_file = self._file == number
            stamps[of_file] = file.stamps(self._row[of_file])
        return stamps

    def index(self, shard: int) -> ShardIndex:
        """Raises DataError if the part of the shard is damaged, and what `errors` has."""
        if shard in self.errors:
            raise self.errors[shard]
        self._check(shard)
        file = self._files[self._file[shard]]
        return _index_of(file.part(int(self._row[shard])), self._shards[shard], file)

    def rows(self, shards: np.ndarray, rows: np.ndarray) -> Rows:
        """Samples and members of many rows at once, of any shards. Raises DataError as `index`."""
        for shard in np.unique(shards[~self._checked[shards]]).tolist():
            self._check(shard)
        of_shards = self._file[shards], self._row[shards], self._starts[shards], self.counts[shards]
        return Rows(self._files, of_shards, rows)

    def _check(self, shard: int) -> None:
        """Compare a part of a large file with its checksum when it is first used."""
        if self._checked[shard]:
            return
        file = self._files[self._file[shard]]
        if not file.is_part_intact(int(self._row[shard])):
            try:
                file.path.unlink(missing_ok=True)
                remedy = "It was removed: start again, and it is built anew"
            except OSError as error:
                remedy = (
                    f"It cannot be removed ({error.strerror}): remove it, or set data.cache_dir to a folder that can "
                    "be written, and it is built anew"
                )
            raise DataError(
                f"{file.path}: the index is damaged where it has {self._shards[shard]} (another checksum). {remedy}"
            )
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
    """Open the indexes of shards; those that are absent, out of date or damaged are built and saved first. Several
    processes may call this at once.

    Args:
        retries: `data.read_retries`: times that a read is tried again after an I/O error.
        processes: to build in. More than one are spawned, which requires a main module that can be imported (`if
            __name__ == "__main__"`).
        progress: None: log messages.
        strict: raise the first error of a shard, when it is found.

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
    """Open the index of one shard; see `open_catalogue`."""
    return open_catalogue([place_of(shard)], cache_dir, retries).index(0)


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


class Rows:
    """Rows of a catalogue, many at once and of any shards.

    Attributes:
        samples: [rows] `SAMPLE`; `first_member` counts from the first of these rows.
        firsts: int64 [rows + 1], the first member of each among `members`.
        members: [members] `MEMBER`; `code` is one of `names`.
        names, kinds: of codes.
    """

    def __init__(
        self,
        files: Sequence[IndexFile],
        of_shards: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
        rows: np.ndarray,
    ) -> None:
        """
        Args:
            of_shards: of the shard of each row: its number in `files`, its row in the table there, the first byte of
                its part, its samples.
            rows: int64, in their shards.
        """
        self.names, self.kinds, bases = list[str](), list[str](), dict[tuple[int, int], int]()
        counts, taken = np.zeros(len(rows), dtype=np.int64), []
        file_of, table_rows, first_bytes, samples = of_shards
        for number, file in enumerate(files):
            which = np.flatnonzero(file_of == number)
            if not len(which):
                continue
            words = file.bytes[: len(file.bytes) // 8 * 8].view("<i8")
            starts = first_bytes[which] // 8
            at = starts + rows[which] * (SAMPLE.itemsize // 8)
            first = words[at]
            counts[which] = words[at + SAMPLE.itemsize // 8] - first
            members = starts + (samples[which] + 1) * (SAMPLE.itemsize // 8) + first * (MEMBER.itemsize // 8)
            codes = file.table["codes"][table_rows[which]]
            for code in np.unique(codes).tolist():
                bases[number, code] = len(self.names)
                extensions, kinds, _ = file.codes[code]
                self.names += extensions
                self.kinds += kinds
            base = np.array([bases.get((number, code), 0) for code in range(len(file.codes))], dtype=np.int64)
            taken.append((which, words, words[at + 1], members, base[codes]))
        self.firsts = np.concatenate([[0], np.cumsum(counts)])
        self.samples = np.zeros(len(rows), dtype=SAMPLE)
        member_words = np.empty((int(self.firsts[-1]), MEMBER.itemsize // 8), dtype="<i8")
        added = np.zeros(len(member_words), dtype=np.int32)
        for which, words, reasons, members, base in taken:
            self.samples.view("<i8").reshape(-1, SAMPLE.itemsize // 8)[which, 1] = reasons
            to = _spread(self.firsts[which], counts[which])
            sources = _spread(members, counts[which], MEMBER.itemsize // 8)
            for column in range(member_words.shape[1]):
                member_words[to, column] = words[sources + column]
            added[to] = np.repeat(base, counts[which])
        self.members = member_words.view(MEMBER).reshape(-1)
        self.members["code"] += added


def _spread(starts: np.ndarray, counts: np.ndarray, step: int = 1) -> np.ndarray:
    """start, start + step, ... so many of each, one after the other."""
    ends = np.cumsum(counts)
    within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    return np.repeat(starts, counts) + step * within
