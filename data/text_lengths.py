"""How many tokens every sample takes in the sequence: counted once, kept beside the shards' indexes.

The plan of a step needs the lengths of all its samples on every rank, also of those that never read text. So every
text is tokenized once before a run: `<shard>.<key>.mimo-lengths` is one JSON line (padded) and int32 tokens of each
sample, media included, cut at `sequence_length`, with a checksum over all. The key is a hash of whatever the lengths
follow from beside the shard: vocabulary, chat template and placeholders, the tokens of the media, the cut, bounds. A
run with another key counts again, into a file of its own; one shard that has changed is counted alone. What is counted
is safe at once: a build that was killed goes on where it was.

The length of a bad sample is that of its stand-in: its placeholders.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from xxhash import xxh3_128

from data.announce import expect_texts
from data.catalogue.places import path_about
from data.errors import DataError
from data.fields import Fields
from data.storage.replace import replacing
from data.storage.streams import Origin
from data.storage.url import Place
from data.storage.version import ShardVersion, open_file

if TYPE_CHECKING:
    from data.dataset import Dataset

_log = logging.getLogger(__name__)

_LONGEST_HEAD = 1 << 16
_AHEAD = 256  # records of a remote shard that are announced together
_FEW = 20_000  # samples that are counted before processes for it would have started


class Counted(NamedTuple):
    """A shard whose texts have been counted."""

    shard: Place
    samples: int


class TextLengths:
    """The lengths of a dataset's samples: which are known, and how the others become known."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._found: dict[int, np.ndarray] = {}

    def missing(self) -> list[int]:
        """Numbers of the shards that have not been counted yet."""
        shards = range(len(self._dataset.shards))
        return [shard for shard in shards if shard not in self._found and not self._load(shard)]

    def serve(self) -> None:
        """Gives the lengths to the dataset, for `Dataset.plan_step`. Raises DataError if some are missing."""
        if missing := self.missing():
            raise DataError(f"the texts of {len(missing)} shard(s) are not counted, {self._shard(missing[0])}")
        self._dataset.lengths = np.concatenate([self._found[shard] for shard in range(len(self._dataset.shards))])

    def count(self, shard: int) -> Counted:
        """Tokenizes every text of a shard and writes its file. Raises what `Dataset.length_of` raises, and DataError if
        the file cannot be written."""
        dataset = self._dataset
        rows = dataset.samples_of(shard)
        lengths = np.empty(rows, dtype=np.int32)
        for row in range(rows):
            if row % _AHEAD == 0:
                expect_texts(dataset, shard, range(row, min(row + 2 * _AHEAD, rows)))
            lengths[row] = dataset.length_of(shard, row)
        self._save(shard, lengths)
        self._found[shard] = lengths
        return Counted(self._shard(shard), rows)

    def build(
        self, open_shard: Callable[[Place, Fields], Dataset] | None = None, processes: int | None = None
    ) -> Generator[Counted]:
        """Counts what is missing, and says of each shard that it is done.

        Args:
            open_shard: opens one shard, by its `data.fields`, as this dataset does; it is called in other processes,
                and can be pickled. None: everything is counted in this one.
            processes: to count in; None: as many as this one may use, if there is work for them.
        """
        missing = self.missing()
        if processes is None:
            few = sum(self._dataset.samples_of(shard) for shard in missing) < _FEW
            processes = 1 if few else len(os.sched_getaffinity(0))
        processes = min(processes, len(missing))
        if open_shard is None or processes <= 1:
            for shard in missing:
                yield self.count(shard)
            return
        # Not forked: this process may have threads, and locks that one of them holds.
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            opener = pickle.dumps(open_shard)
            jobs = [
                pool.submit(_count_one, opener, self._shard(shard), self._dataset.fields_of(shard)) for shard in missing
            ]
            try:
                for job in as_completed(jobs):
                    yield job.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def path(self, shard: int, writable: bool = False) -> Path:
        """Where the lengths of a shard are."""
        dataset = self._dataset
        suffix = f".{dataset.lengths_key(shard)}.mimo-lengths"
        return path_about(self._shard(shard), dataset.cache_dir, writable=writable, suffix=suffix)

    def _shard(self, shard: int) -> Place:
        return self._dataset.shards[shard]

    def _load(self, shard: int) -> bool:
        head, tried = self._head(shard), None
        for writable in (False, True):
            path = self.path(shard, writable)
            found = None if path == tried else _read(path, head)
            tried = path
            if found is not None:
                self._found[shard] = found
                return True
        return False

    def _save(self, shard: int, lengths: np.ndarray) -> None:
        path, body, head = self.path(shard, writable=True), lengths.tobytes(), self._head(shard)
        line = json.dumps(head | {"checksum": _checksum(head, body)}).encode()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path, mode=0o644) as file:
                file.write(line + b" " * (-(len(line) + 1) % 64) + b"\n" + body)
        except OSError as error:
            raise DataError(
                f"cannot write the text lengths {path} ({error.strerror}): set data.cache_dir to a folder that can be "
                "written"
            ) from error

    def _head(self, shard: int) -> dict[str, object]:
        """What the file says of itself, and has to."""
        version: ShardVersion = self._dataset.version(shard)
        return {
            "key": self._dataset.lengths_key(shard),
            "size": version.size,
            "content": version.content,
            "mtime_ns": version.mtime_ns,
            "samples": self._dataset.samples_of(shard),
        }


def _read(path: Path, expected: dict[str, object]) -> np.ndarray | None:
    """The lengths of a file; None if it is absent, of another shard, or damaged."""
    try:
        with open(open_file(path), "rb") as file:
            head = json.loads(file.readline(_LONGEST_HEAD))
            body = file.read()
        checksum = head.pop("checksum")
        if head != expected:
            return None
        if checksum != _checksum(head, body) or len(body) != 4 * int(head["samples"]):
            raise DataError("its checksum is wrong")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        _log.warning("%s: the text lengths are damaged or cannot be read, and counted again: %s", path, error)
        return None
    return np.frombuffer(body, dtype=np.int32)


def _checksum(head: dict[str, object], body: bytes) -> str:
    digest = xxh3_128(json.dumps(head, sort_keys=True).encode())
    digest.update(body)
    return digest.hexdigest()


_opener = lru_cache(maxsize=1)(pickle.loads)  # one for all shards that a process counts: it may hold a tokenizer


def _count_one(opener: bytes, path: Place, fields: Fields) -> Counted:
    """At module level, so that worker processes can find it."""
    dataset = _opener(opener)(path, fields)
    try:
        lengths = TextLengths(dataset)
        done = [lengths.count(shard) for shard in lengths.missing()]
        return Counted(path, sum(one.samples for one in done))
    finally:
        dataset.close()


def require_planned(found: int, planned: int, where: tuple[Origin, str]) -> None:
    """Raises DataError for a text that is not as long as the plan of its step says: its row may have no room for it."""
    if found != planned:
        shard, key = where
        raise DataError(
            f"{shard}, key {key!r}: its text has {found} tokens, and had {planned} when texts were counted: the "
            "tokenizer or the shard has changed in a way that does not show. Remove the *.mimo-lengths beside the "
            "shards, or in data.cache_dir, and start again"
        )
