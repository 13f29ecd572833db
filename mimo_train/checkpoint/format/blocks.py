"""Read the bytes of a complete checkpoint in hashed blocks."""

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from threading import Lock

from data.storage.stores import read_range, start_read, store_of
from data.storage.url import WEB, ObjectMeta, Place, Url
from data.text_format import listed
from mimo_train.checkpoint.format.files import (
    INDEX,
    Damage,
    digest,
    digest_of,
    marked_file,
    objects_in,
    open_file,
    patiently,
)
from mimo_train.checkpoint.format.index import BLOCK, SIZES, File, Index

MOST_VIEWS = 1024
"""Most memory views that one system call fills."""
AHEAD = 8
"""Blocks to read ahead from object storage."""


class Blocks:
    """The blocks of a checkpoint's files.

    Attributes:
        index: index of the checkpoint.

    Raises:
        Damage: it is incomplete, or its index is not what was written.
    """

    def __init__(self, folder: Place):
        self.folder = folder
        self.index = Index.load(marked_file(folder, INDEX))
        self._open: dict[int, int] = {}
        self._stale: list[int] = []
        self._opening = Lock()
        self._expected: deque[tuple[int, int]] = deque()
        self._begun: dict[tuple[int, int], Future[memoryview]] = {}

    def require_files(self) -> None:
        """Check every file. Call it on one rank: together, ranks would open each file once per rank.

        Raises:
            Damage: a file is missing, or its size or header is not what was written.
        """
        there = self._objects()
        with ThreadPoolExecutor(16) as pool:  # requests to object storage have latency
            every = pool.map if isinstance(self.folder, Url) else map
            for _ in every(partial(self._require_patiently, there=there), self.index.files):
                pass

    def damage(self, workers: int = 4) -> list[str]:
        """Read the whole checkpoint in `workers` threads and return the damage, by file and tensors."""
        found, whole = [], []
        try:
            there = self._objects()
        except OSError as error:
            return [str(error)]
        for number, file in enumerate(self.index.files):
            try:
                self._require_file(file, there)
                whole.append(number)
            except (Damage, OSError) as error:
                found.append(str(error))
        blocks = [(number, block) for number in whole for block in range(len(self.index.files[number].hashes) - 1)]
        with ThreadPoolExecutor(workers) as pool:
            return found + [said for said in pool.map(self._damage, blocks) if said]

    def size_of(self, number: int, block: int) -> int:
        """Return the bytes of a block; blocks start after the file's header."""
        file = self.index.files[number]
        return min(BLOCK, file.size - file.header - block * BLOCK)

    def read(self, number: int, block: int, into: Sequence[memoryview]) -> None:
        """Read a block and compare its hash.

        Args:
            into: memory views of the block's size in total, filled in order.

        Raises:
            Damage: it is not what was written; names file and tensors.
            OSError: it cannot be read, even after retries.
        """

        def once() -> None:
            try:
                self._read(number, block, into)
            except OSError:
                # A handle that the server has forgotten stays bad, but another thread may still be reading from it.
                with self._opening:
                    if number in self._open:
                        self._stale.append(self._open.pop(number))
                raise

        patiently(once, self.folder / self.index.files[number].name)

    def _read(self, number: int, block: int, into: Sequence[memoryview]) -> None:
        file = self.index.files[number]
        begin, size = file.header + block * BLOCK, self.size_of(number, block)
        assert sum(map(len, into)) == size, (number, block)
        if isinstance(self.folder, Url):
            self._read_object(number, block, into)
        else:
            self._read_file(number, begin, into)
        if digest_of(into) != file.hashes[1 + block]:
            raise Damage(
                f"{file.name} is damaged between bytes {begin} and {begin + size}: {self._held(number, block)}"
            )

    def expect(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Set the order of the next reads: objects are read ahead."""
        self._expected = deque(blocks if isinstance(self.folder, Url) else ())
        self._begun.clear()

    def _read_object(self, number: int, block: int, into: Sequence[memoryview]) -> None:
        """Fill `into`, and start reading the next expected blocks."""
        own = self._begun.pop((number, block), None) or self._begin(number, block)
        while self._expected and len(self._begun) < AHEAD:
            place = self._expected.popleft()
            if place != (number, block):
                self._begun[place] = self._begin(*place)
        content = own.result()
        if len(content) != self.size_of(number, block):
            raise Damage(f"{self.index.files[number].name} was cut short while it was read")
        at = 0
        for view in into:
            view[:] = content[at : at + len(view)]
            at += len(view)

    def _begin(self, number: int, block: int) -> Future[memoryview]:
        assert isinstance(self.folder, Url)
        file = self.index.files[number]
        begin = file.header + block * BLOCK
        return start_read(self.folder / file.name, begin, min(BLOCK, file.size - begin))

    def _read_file(self, number: int, at: int, into: Sequence[memoryview]) -> None:
        assert not isinstance(self.folder, Url)
        file = self.index.files[number]
        with self._opening:
            if number not in self._open:
                self._open[number] = open_file(self.folder / file.name)
            there = self._open[number]
        left = deque(into)
        while left:
            count = os.preadv(there, [*islice(left, MOST_VIEWS)], at)
            if not count:
                raise Damage(f"{file.name} was cut short while it was read")
            at += count
            while left and count >= len(left[0]):
                count -= len(left.popleft())
            if count:
                left[0] = left[0][count:]

    def close(self) -> None:
        """Close the files."""
        for file in (*self._open.values(), *self._stale):
            with suppress(OSError):
                os.close(file)
        self._open.clear()
        self._stale.clear()
        self._expected.clear()
        self._begun.clear()

    def _objects(self) -> dict[str, ObjectMeta] | None:
        """Return the objects in the folder by name; None for files and web servers."""
        if not isinstance(self.folder, Url) or self.folder.scheme in WEB:
            return None
        return patiently(partial(objects_in, self.folder), self.folder)

    def _require_patiently(self, file: File, there: dict[str, ObjectMeta] | None) -> None:
        patiently(partial(self._require_file, file, there), self.folder / file.name)

    def _require_file(self, file: File, there: dict[str, ObjectMeta] | None) -> None:
        require_size(self.folder, file, there)
        if isinstance(self.folder, Url):
            header: bytes | memoryview = read_range(self.folder / file.name, 0, file.header)
        else:
            with os.fdopen(open_file(self.folder / file.name), "rb") as opened:
                header = opened.read(file.header)
        if digest(header) != file.hashes[0]:
            raise Damage(f"{file.name} is damaged in its header")

    def _damage(self, place: tuple[int, int]) -> str:
        try:
            # Without retries: on a disk that fails everywhere the pauses would add up.
            self._read(*place, [memoryview(bytearray(self.size_of(*place)))])
        except (Damage, OSError) as error:
            return str(error)
        return ""

    def _held(self, number: int, block: int) -> str:
        return listed(list(self._names(number, block)))

    def _names(self, number: int, block: int) -> Iterator[str]:
        for key, pieces in self.index.pieces.items():
            size = SIZES[self.index.dtypes[key]]
            for piece in pieces:
                begins, ends = piece.at < (block + 1) * BLOCK, piece.at + piece.span.numel * size > block * BLOCK
                if piece.file == number and begins and ends:
                    yield f"{key.module} {key.name} ({key.state})"


def require_size(folder: Place, file: File, objects: Mapping[str, ObjectMeta] | None = None) -> None:
    """Check a file's size. It opens the file: network file systems may report an old size otherwise.

    Args:
        objects: for a folder of objects, its contents by name; None requests this one.

    Raises:
        Damage: it is missing or has another size.
    """
    if isinstance(folder, Url):
        try:
            size = (store_of(folder).look(folder / file.name) if objects is None else objects[file.name]).size
        except (FileNotFoundError, KeyError):
            raise Damage(f"{file.name} is missing") from None
    else:
        there = open_file(folder / file.name)
        try:
            size = os.fstat(there).st_size
        finally:
            os.close(there)
    if size != file.size:
        raise Damage(f"{file.name} has {size} bytes, not {file.size}")
