"""Read a checkpoint at any layout: only the blocks with requested elements, each compared with its hash."""

import os
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from data.storage.object_store import read_range, start_read
from data.storage.url import WEB, ObjectMeta, Place, Url
from data.text_format import listed
from mimo_train.checkpoint.format.files import (
    INDEX,
    Damage,
    digest,
    marked_file,
    objects_in,
    open_file,
    patiently,
    require_size,
)
from mimo_train.checkpoint.format.index import BLOCK, DTYPES, SIZES, File, Index, Key, Piece
from mimo_train.checkpoint.format.spans import Span, common_range, copy_common

if TYPE_CHECKING:
    import torch

KEPT = 16
"""Blocks that a reader keeps: neighbours of a small tensor are often read next."""
AHEAD = 8
"""Blocks to read ahead from object storage."""

Block = tuple[int, int]
"""Position of a file in the index, and of a block after the file's header."""


@dataclass(frozen=True)
class Wanted:
    """A span of a tensor to read."""

    key: Key
    span: Span
    into: "torch.Tensor"
    """[span.numel], in host memory; values are cast to its dtype."""


class Reader:
    """Reader of a complete checkpoint's tensors.

    Attributes:
        index: index of the checkpoint.

    Raises:
        Damage: it is incomplete, or its index is not what was written.
    """

    def __init__(self, folder: Place):
        self.folder = folder
        self.index = Index.load(marked_file(folder, INDEX))
        self._kept: OrderedDict[Block, memoryview] = OrderedDict()

    def fill(self, wanted: Iterable[Wanted]) -> None:
        """Read into the given tensors.

        Raises:
            KeyError: a tensor is not in the checkpoint.
            Damage: a needed block has another hash; names file and tensor.
            OSError: a block cannot be read, even after retries.
        """
        import torch  # here: what only looks at files starts without it

        wanted = list(wanted)
        uses: dict[Block, list[tuple[int, Span, int, int]]] = {}
        for number, target in enumerate(wanted):
            for piece in self.index.pieces[target.key]:
                for block, part, low, high in self._uses(target, piece):
                    uses.setdefault(block, []).append((number, part, low, high))
        copied = [0] * len(wanted)
        for block, content in self._contents(sorted(uses)):
            for number, part, low, high in uses[block]:
                target = wanted[number]
                values = torch.frombuffer(content[low:high], dtype=self.dtype(target.key))
                copied[number] += copy_common(target.span, target.into, part, values)
        for target, count in zip(wanted, copied, strict=True):
            if count != target.span.numel:
                raise Damage(f"{' '.join(target.key)} has {count} of {target.span.numel} elements")

    def dtype(self, key: Key) -> "torch.dtype":
        """Return the stored dtype of a tensor."""
        import torch

        return getattr(torch, DTYPES[self.index.dtypes[key]])

    def whole(self, key: Key) -> "torch.Tensor":
        """Return a whole tensor in its stored dtype."""
        import torch

        shape = self.index.shape(key)
        values = torch.empty(shape, dtype=self.dtype(key))
        self.fill([Wanted(key, Span.of_whole(shape), values.view(-1))])
        return values

    def require_files(self) -> None:
        """Check every file. Call it on one rank: together, ranks would open each file once per rank.

        Raises:
            Damage: a file is missing, or its size or header is not what was written.
        """
        objects = self._objects()

        def check(file: File) -> None:
            patiently(partial(self._require_file, file, objects), self.folder / file.name)

        with ThreadPoolExecutor(16) as pool:  # requests to object storage have latency
            every = pool.map if isinstance(self.folder, Url) else map
            for _ in every(check, self.index.files):
                pass

    def damage(self, workers: int = 4) -> list[str]:
        """Read the whole checkpoint in `workers` threads and return the damage, by file and tensors."""
        faults, blocks = [], list[Block]()
        try:
            objects = self._objects()
        except OSError as error:
            return [str(error)]
        for number, file in enumerate(self.index.files):
            try:
                self._require_file(file, objects)
                blocks += [(number, block) for block in range(len(file.hashes) - 1)]
            except (Damage, OSError) as error:
                faults.append(str(error))

        def check(block: Block) -> str:
            try:
                # Without retries: on a disk that fails everywhere the pauses would add up.
                self._read(block, memoryview(bytearray(self._size_of(block))))
            except (Damage, OSError) as error:
                return str(error)
            return ""

        with ThreadPoolExecutor(workers) as pool:
            return faults + [fault for fault in pool.map(check, blocks) if fault]

    def _uses(self, target: Wanted, piece: Piece) -> Iterator[tuple[Block, Span, int, int]]:
        """Yield what a target needs of a piece: block, span of these elements, and their first and last + 1 byte in
        the block."""
        common = common_range(target.span, piece.span)
        if common is None:
            return
        width = SIZES[self.index.dtypes[target.key]]
        base = piece.at - piece.span.start * width
        begin, end = (base + element * width for element in common)
        for number in range(begin // BLOCK, -(-end // BLOCK)):
            start = number * BLOCK
            low, high = max(begin, start), min(end, start + BLOCK)
            part = piece.span.part((low - base) // width, (high - base) // width)
            yield (piece.file, number), part, low - start, high - start

    def _contents(self, blocks: list[Block]) -> Iterator[tuple[Block, memoryview]]:
        """Yield blocks in order, from memory if they were read last; objects are read ahead."""
        started: dict[Block, Future[memoryview]] = {}
        ahead = deque(block for block in blocks if block not in self._kept and isinstance(self.folder, Url))
        for block in blocks:
            while ahead and len(started) < AHEAD:
                upcoming = ahead.popleft()
                started[upcoming] = self._start(upcoming)
            if block not in self._kept:
                # Reuse memory: allocating it costs more than the read.
                used = self._kept.popitem(last=False)[1] if len(self._kept) == KEPT else memoryview(b"")
                size = self._size_of(block)
                content = used if len(used) == size else memoryview(bytearray(size))
                futures = [started.pop(block)] if block in started else []
                path = self.folder / self.index.files[block[0]].name
                patiently(partial(self._read, block, content, futures), path)
                self._kept[block] = content
            self._kept.move_to_end(block)
            yield block, self._kept[block]

    def _size_of(self, block: Block) -> int:
        file = self.index.files[block[0]]
        return min(BLOCK, file.size - file.header - block[1] * BLOCK)

    def _start(self, block: Block) -> Future[memoryview]:
        assert isinstance(self.folder, Url)
        file = self.index.files[block[0]]
        return start_read(self.folder / file.name, file.header + block[1] * BLOCK, self._size_of(block))

    def _read(self, block: Block, into: memoryview, started: list[Future[memoryview]] | None = None) -> None:
        """Read a block and compare its hash.

        Args:
            started: the read if it has begun; removed from the list, so that a retry reads again.
        """
        file = self.index.files[block[0]]
        begin = file.header + block[1] * BLOCK
        if isinstance(self.folder, Url):
            content = (started.pop() if started else self._start(block)).result()
            count = len(content)
            into[:count] = content
        else:
            # Opened for each block: a handle that the server has forgotten would stay bad.
            with os.fdopen(open_file(self.folder / file.name), "rb", buffering=0) as opened:
                count = os.preadv(opened.fileno(), [into], begin)
                while 0 < count < len(into) and (more := os.preadv(opened.fileno(), [into[count:]], begin + count)):
                    count += more
        if count != len(into):
            raise Damage(f"{file.name} was cut short while it was read")
        if digest(into) != file.hashes[1 + block[1]]:
            tensors = listed(list(self._tensors_in(block)))
            raise Damage(f"{file.name} is damaged between bytes {begin} and {begin + len(into)}: {tensors}")

    def _objects(self) -> dict[str, ObjectMeta] | None:
        """Return the objects in the folder by name; None for files and web servers."""
        if not isinstance(self.folder, Url) or self.folder.scheme in WEB:
            return None
        return patiently(partial(objects_in, self.folder), self.folder)

    def _require_file(self, file: File, objects: dict[str, ObjectMeta] | None) -> None:
        path = self.folder / file.name
        require_size(path, file.size, objects)
        if isinstance(path, Url):
            header: bytes | memoryview = read_range(path, 0, file.header)
        else:
            with os.fdopen(open_file(path), "rb") as opened:
                header = opened.read(file.header)
        if digest(header) != file.hashes[0]:
            raise Damage(f"{file.name} is damaged in its header")

    def _tensors_in(self, block: Block) -> Iterator[str]:
        first, last = block[1] * BLOCK, (block[1] + 1) * BLOCK
        for key, pieces in self.index.pieces.items():
            for piece in pieces:
                end = piece.at + piece.span.numel * SIZES[self.index.dtypes[key]]
                if piece.file == block[0] and piece.at < last and end > first:
                    yield f"{key.module} {key.name} ({key.state})"
