"""Media of a row as files or bytes: what their headers say, and what of them cannot be used."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import NamedTuple

from data.media.bounds import BOUNDS
from data.errors import RecordError
from data.media.audio_headers import parse_audio_header
from data.media.headers import parse_header
from data.media.video_headers import parse_video_header
from data.records.members import READABLE
from data.text_format import shown
from data.storage.files import pread_all

_READ = os.O_RDONLY | os.O_CLOEXEC
_AT_ONCE = _READ | os.O_NONBLOCK | os.O_NOCTTY  # a FIFO is not waited for


class Place(NamedTuple):
    """Bytes of a file that stays where it is while shards are built."""

    path: str
    offset: int | None
    """None: the whole file."""
    size: int


class Medium(NamedTuple):
    """A picture, video or clip of a row."""

    kind: str
    extension: str
    content: bytes | Place
    name: str
    """For messages."""
    extent: tuple[int, int] | None
    """What `extent_of` says of it."""


def medium_of_file(kind: str, folder: str, name: str, where: str) -> Medium:
    """A file that a record names, below a folder. Raises RecordError: it is not there, or of a kind that is not
    decoded."""
    extension = name.rpartition(".")[2].lower()
    if extension not in READABLE[kind]:
        known = ", ".join(sorted(READABLE[kind]))
        raise RecordError(f"{where}: {shown(name)} is no {kind} that can be decoded ({known})")
    path = os.path.join(folder, name)
    fd = _opened(path, where)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise _no_file(path, where)
        extent = _extent_in(kind, fd, 0, found.st_size)
    finally:
        os.close(fd)
    return Medium(kind, extension, Place(path, None, found.st_size), name, extent)


def _opened(path: str, where: str) -> int:
    """Raises RecordError: there is no such file. OSError: it cannot be read."""
    try:
        return os.open(path, _AT_ONCE)
    except (OSError, ValueError):
        return _opened_if_file(path, where)


def _opened_if_file(path: str, where: str) -> int:
    """`_opened` of what cannot be opened at once."""
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        said = f"no file {path}" if isinstance(error, FileNotFoundError) else f"{path}: {error}"
        raise RecordError(f"{where}: {shown(said)}") from error
    if not stat.S_ISREG(found.st_mode):
        raise _no_file(path, where)
    return os.open(path, _READ)


def _no_file(path: str, where: str) -> RecordError:
    return RecordError(f"{where}: no file {shown(path)}")


def wrong_extent(kind: str, extent: tuple[int, int] | None) -> str:
    """Return what is wrong with a medium that has no readable header or exceeds its bounds, to follow its name in a
    message; empty if nothing is wrong.

    Args:
        extent: see `data.media.headers.parse_extent`; zeros are none.
    """
    if extent is None or 0 in extent:
        return f" has no readable {kind} header" + ("" if kind == "image" else ", or is cut off")
    above = (BOUNDS.of_clip if kind == "audio" else BOUNDS.of_picture)(*extent)
    return f": {above}" if above else ""


def extent_of(kind: str, content: bytes | Place) -> tuple[int, int] | None:
    """What a medium's own header says of it, see `wrong_extent`. Raises OSError."""
    if isinstance(content, bytes):
        return _extent(kind, lambda at, length: content[at : at + length], len(content))
    fd = os.open(content.path, _READ)
    try:
        return _extent_in(kind, fd, content.offset or 0, content.size)
    finally:
        os.close(fd)


def _extent_in(kind: str, fd: int, start: int, size: int) -> tuple[int, int] | None:
    return _extent(kind, lambda at, length: pread_all(fd, max(min(length, size - at), 0), start + at), size)


def _extent(kind: str, read: Callable[[int, int], bytes], size: int) -> tuple[int, int] | None:
    if kind == "audio":
        return parse_audio_header(read(0, size))
    header = parse_video_header(read, size) if kind == "video" else parse_header(read, size)
    return None if header is None else (header.height, header.width)
