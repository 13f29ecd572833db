"""The bytes of a complete checkpoint, in blocks that each have a hash. Imports no torch."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock

from data.listed import listed
from mimo_train.checkpoint.format.durable import digest
from mimo_train.checkpoint.format.files import INDEX, Damage, marked_file, open_file, patiently
from mimo_train.checkpoint.format.index import BLOCK, SIZES, File, Index


class Blocks:
    """The blocks of the files of a checkpoint.

    Attributes:
        index: what is in it.

    Raises:
        Damage: it is not complete, or its index is not what was written.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.index = Index.load(marked_file(folder, INDEX))
        self._open: dict[int, int] = {}
        self._stale: list[int] = []
        self._opening = Lock()

    def require_files(self) -> None:
        """Look at every file: for one rank of many, which together would open each file as often as there are files.

        Raises:
            Damage: one is missing, or its size or header is not what was written.
        """
        for file in self.index.files:
            patiently(partial(self._require_file, file), self.folder / file.name)

    def damage(self, workers: int = 4) -> list[str]:
        """What is damaged, by file and tensors. Reads all of the checkpoint, in as many threads."""
        found, whole = [], []
        for number, file in enumerate(self.index.files):
            try:
                self._require_file(file)
                whole.append(number)
            except (Damage, OSError) as error:
                found.append(str(error))
        blocks = [(number, block) for number in whole for block in range(len(self.index.files[number].hashes) - 1)]
        with ThreadPoolExecutor(workers) as pool:
            return found + [said for said in pool.map(self._damage, blocks) if said]

    def read(self, number: int, block: int, into: memoryview | None = None) -> memoryview:
        """A block behind the header of a file, after its hash was compared.

        Args:
            into: memory of its size, which it is read into.

        Raises:
            Damage: it is not what was written; names file and tensors.
            OSError: it cannot be read, also when it is tried again.
        """

        def once() -> memoryview:
            try:
                return self._read(number, block, into)
            except OSError:
                # A handle that the server has forgotten stays bad. Another thread may be reading from it yet.
                with self._opening:
                    if number in self._open:
                        self._stale.append(self._open.pop(number))
                raise

        return patiently(once, self.folder / self.index.files[number].name)

    def _read(self, number: int, block: int, into: memoryview | None = None) -> memoryview:
        file = self.index.files[number]
        with self._opening:
            if number not in self._open:
                self._open[number] = open_file(self.folder / file.name)
            there = self._open[number]
        begin = file.header + block * BLOCK
        view = memoryview(bytearray(min(BLOCK, file.size - begin))) if into is None else into
        done = 0
        while done < len(view):
            count = os.preadv(there, [view[done:]], begin + done)
            if not count:
                raise Damage(f"{file.name} was cut short while it was read")
            done += count
        if digest(view) != file.hashes[1 + block]:
            raise Damage(
                f"{file.name} is damaged between bytes {begin} and {begin + len(view)}: {self._held(number, block)}"
            )
        return view

    def close(self) -> None:
        """Close the files."""
        for file in (*self._open.values(), *self._stale):
            with suppress(OSError):
                os.close(file)
        self._open.clear()
        self._stale.clear()

    def _require_file(self, file: File) -> None:
        require_size(self.folder, file)
        with os.fdopen(open_file(self.folder / file.name), "rb") as there:
            if digest(there.read(file.header)) != file.hashes[0]:
                raise Damage(f"{file.name} is damaged in its header")

    def _damage(self, place: tuple[int, int]) -> str:
        try:
            self._read(*place)  # once: of a disk that fails everywhere the pauses would add up
        except (Damage, OSError) as error:
            return str(error)
        return ""

    def _held(self, number: int, block: int) -> str:
        """The tensors that a block has parts of."""
        return listed(list(self._names(number, block)))

    def _names(self, number: int, block: int) -> Iterator[str]:
        for key, pieces in self.index.pieces.items():
            size = SIZES[self.index.dtypes[key]]
            for piece in pieces:
                begins, ends = piece.at < (block + 1) * BLOCK, piece.at + piece.span.numel * size > block * BLOCK
                if piece.file == number and begins and ends:
                    yield f"{key.module} {key.name} ({key.state})"


def require_size(folder: Path, file: File) -> None:
    """Opens the file: on a network file system the size of one that is only looked at may be an old one.

    Raises:
        Damage: it is missing or has another size.
    """
    there = open_file(folder / file.name)
    try:
        size = os.fstat(there).st_size
    finally:
        os.close(there)
    if size != file.size:
        raise Damage(f"{file.name} has {size} bytes, not {file.size}")
