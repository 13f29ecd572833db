"""Write a checkpoint: every rank writes its own file, then rank 0 the index and the completion marker."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from xxhash import xxh3_128

from data.storage.url import Place, Url
from data.text_format import listed
from mimo_train.checkpoint.format.files import (
    INDEX,
    PARTIAL,
    Damage,
    digest,
    flush_folder,
    objects_in,
    of_rank,
    read_files,
    remove_files,
    require_size,
    write_file,
    write_marker,
)
from mimo_train.checkpoint.format.index import BLOCK, DTYPES, WEIGHT, File, Index, Key, Piece
from mimo_train.checkpoint.format.spans import Span
from mimo_train.flight.recorder import RECORDER

DTYPE_NAMES = {getattr(torch, dtype): name for name, dtype in DTYPES.items()}
"""Safetensors names of torch dtypes."""

_DIGEST = 32
"""Characters of a hash."""


@dataclass(frozen=True)
class Part:
    """Values of a span of a tensor."""

    key: Key
    span: Span
    values: torch.Tensor
    """[span.numel]; copied to the host when they are written."""
    must_be_finite: bool = False

    @property
    def nbytes(self) -> int:
        """Return the size of the values in bytes."""
        return self.span.numel * self.values.dtype.itemsize


class NotFinite(ValueError):
    """Values that must be finite are not."""


def in_order(parts: Iterable[Part]) -> list[Part]:
    """Return parts in file order: by decreasing element size, and weights before optimizer values. So every element is
    aligned and within one block, and readers of weights alone skip most other blocks."""
    return sorted(parts, key=lambda part: (-part.values.dtype.itemsize, part.key.state != WEIGHT))


def write_rank(folder: Place, rank: int, parts: Sequence[Part]) -> None:
    """Write a rank's tensors without a copy, and a listing of their positions, which `complete` reads and removes.

    Raises:
        NotFinite: names the tensors; nothing is left of the file.
        OSError: the files cannot be written.
    """
    ordered = in_order(parts)
    header, places, at = {}, [], 0
    for part in ordered:
        header[_name(part)] = {
            "dtype": DTYPE_NAMES[part.values.dtype],
            "shape": [part.span.numel],
            "data_offsets": [at, at + part.nbytes],
        }
        places.append(at)
        at += part.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
    head = len(text).to_bytes(8, "little") + text
    (name, listing), hashes = of_rank(rank), [digest(head)]
    size = write_file(folder / name, _hashed(head, ordered, hashes), len(head) + at)
    index = Index(files=[File(name, size, len(head), tuple(hashes))])
    for part, place in zip(ordered, places, strict=True):
        index.add(part.key, DTYPE_NAMES[part.values.dtype], Piece(0, place, part.span))
    content = index.dump()
    # Add a hash: otherwise nothing detects changed positions before `complete` reads the listing.
    write_file(folder / listing, [content, digest(content).encode()])


def complete(folder: Place, ranks: int, others: Mapping[str, bytes], sizes: Sequence[int] | None = None) -> None:
    """Turn a folder with every rank's file into a checkpoint. It gets its marker when everything else is on disk.

    Args:
        others: further files by name.
        sizes: bytes of each rank's values, if known.

    Raises:
        Damage: a rank's file is missing, has another size or is not what was written, or elements are missing.
        OSError: the folder cannot be written.
    """
    index = Index()
    listings = [folder / of_rank(rank)[1] for rank in range(ranks)]
    for listing, text in zip(listings, read_files(listings), strict=True):
        index.join(_listed(listing.name, text))
    index.require_whole()
    objects = objects_in(folder) if isinstance(folder, Url) else None
    for number, file in enumerate(index.files):
        require_size(folder / file.name, file.size, objects)
        if sizes is not None and file.size - file.header != sizes[number]:
            raise Damage(f"{file.name} has {file.size - file.header} bytes of values, not {sizes[number]}")
    files = {INDEX: index.dump(), **others}
    for name, content in files.items():
        write_file(folder / name, [content])
    remove_files(listings)
    for flushed in (folder, folder.parent):
        flush_folder(flushed)
    write_marker(folder, files)
    remove_files([folder / PARTIAL])


def _listed(name: str, text: bytes) -> Index:
    content, written = text[:-_DIGEST], text[-_DIGEST:]
    if digest(content).encode() != written:
        raise Damage(f"{name} is not what its rank has written")
    return Index.load(content, whole=False)


def _name(part: Part) -> str:
    """Name a part for other tools that open the file; checkpoints are read by their index."""
    place = ".".join(map(str, part.span.offset))
    return f"{part.key.module}/{part.key.name}/{part.key.state}@{place}+{part.span.start}"


def _hashed(head: bytes, parts: Sequence[Part], hashes: list[str]) -> Iterator[bytes | memoryview]:
    """Yield the file's bytes, and append the hash of every block to `hashes`."""
    yield head
    block, filled = xxh3_128(), 0
    for number, part in enumerate(parts):
        # A single element counts as contiguous at any stride, and then has no view as bytes.
        values = part.values.cpu().contiguous().as_strided((part.span.numel,), (1,))
        left, width = memoryview(values.view(torch.uint8).numpy()), values.dtype.itemsize
        while left:
            piece, left = left[: BLOCK - filled], left[BLOCK - filled :]
            at = part.nbytes - len(left)
            # Check the piece now: the hash and the kernel find it in the cache next.
            if part.must_be_finite and not _are_finite(values[(at - len(piece)) // width : at // width]):
                raise _not_finite(parts[number:])
            block.update(piece)
            yield piece
            filled += len(piece)
            if filled == BLOCK:
                RECORDER.tick()
                hashes.append(block.hexdigest())
                block, filled = xxh3_128(), 0
    if filled:
        hashes.append(block.hexdigest())


def _are_finite(values: torch.Tensor) -> bool:
    """True if all are finite. `isfinite().all()` allocates a mask and takes ten times as long."""
    return all(math.isfinite(end) for end in values.aminmax())


def _not_finite(parts: Sequence[Part]) -> NotFinite:
    names = dict.fromkeys(
        f"{part.key.module} {part.key.name}" for part in parts if part.must_be_finite and not _are_finite(part.values)
    )
    return NotFinite(listed(list(names)))
