"""Shards as bytes that come once, from the first to the last: files, objects, files of web servers, output of commands;
decompressed where they are compressed, whatever their names are."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from pathlib import Path
from typing import Any, cast

from data.errors import DataError, MissingLibrary, ShardError
from data.reading import READS
from data.storage.command import Command, CommandBytes
from data.storage.remote import WholeObject
from data.storage.retry import RETRIES, retrying
from data.storage.url import WEB, Place, Url
from data.storage.version import ShardVersion, open_file
from data.storage.web_bytes import WebBytes

Origin = Place | Command
"""Where a shard is from."""

_CHUNK = 1 << 20  # bytes that are read, or decompressed, at once
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_OTHERS = {b"BZh": "bzip2", b"\xfd7zXZ": "xz"}


class Stream:
    """The bytes of a shard, decompressed. Reads go forward: none is of a byte before the one asked for last.

    Args:
        retries: times that a read is tried again after an I/O error.

    Raises:
        ShardError, ReadError, MissingLibrary: the shard cannot be opened, or, from reads, is damaged or cut.
    """

    def __init__(self, place: Origin, retries: int = RETRIES) -> None:
        self._place = place
        self._raw = _opened(place, retries)
        self._file: io.BufferedIOBase | None = None  # known by its first bytes, which a command may let wait
        self._held, self._start = b"", 0

    def read(self, length: int, offset: int) -> bytes:
        """What is at `offset`: `length` bytes, or fewer at the end."""
        passed = offset - self._start
        assert passed >= 0, "streams are read forward"
        held = [self._held[passed:]]
        have, passed = len(held[0]), passed - len(self._held)
        while passed > 0 and (skipped := self._next(passed)):
            passed -= len(skipped)
        while have < length and (more := self._next(length - have)):
            held.append(more)
            have += len(more)
        self._held, self._start = b"".join(held), offset
        return self._held[:length]

    def stop(self) -> None:
        """Let a read of a command that another thread waits for end."""
        if isinstance(self._raw, CommandBytes):
            self._raw.stop()

    def close(self) -> None:
        """Close the file, or end the command."""
        self._raw.close()

    def _next(self, size: int) -> bytes:
        try:
            if self._file is None:
                self._file = _decompressed(self._place, io.BufferedReader(self._raw, _CHUNK))
            content = self._file.read1(min(size, _CHUNK))
        except EOFError as error:
            raise ShardError(
                f"{self._place}: the compressed data end too early. Copy or write the shard again."
            ) from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise ShardError(
                f"{self._place}: the compressed data are damaged ({error}). Copy or write the shard again."
            ) from error
        READS.count += 1
        return content


class _FileBytes(io.RawIOBase):
    def __init__(self, path: Path, retries: int) -> None:
        self._path, self._retries, self._at = path, retries, 0
        self._fd = retrying(lambda: open_file(path), f"{path}: cannot open it", retries)
        self._before = os.fstat(self._fd)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        what = f"{self._path}: cannot read {len(buffer)} bytes at byte {self._at}"
        with READS.of(self._path):
            content = retrying(lambda: os.pread(self._fd, len(buffer), self._at), what, self._retries)
        now = os.fstat(self._fd)
        if (now.st_size, now.st_mtime_ns) != (self._before.st_size, self._before.st_mtime_ns):
            raise ShardError(f"{self._path}: the shard changed while it was read. Start again when it is whole.")
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)

    def close(self) -> None:
        if not self.closed:
            os.close(self._fd)
        super().close()


class _ObjectBytes(io.RawIOBase):
    def __init__(self, url: Url, retries: int) -> None:
        self._url, self._at = url, 0
        self._object = WholeObject(url, retries)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with READS.of(self._url):
            content = self._object.read(len(buffer), self._at)
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


def version_of(place: Origin, retries: int = RETRIES) -> tuple[int, str]:
    """(bytes, a hash of samples of its content) of a shard, as far as they are known without reading it: of a file
    both, of an object its size, of a web server's file and of a command nothing (0 and empty).

    Raises:
        ShardError, ReadError: it cannot be opened.
    """
    if isinstance(place, Url):
        return (place.seen or (0, ""))[0], ""
    if isinstance(place, Command):
        return 0, ""
    fd = retrying(lambda: open_file(place), f"{place}: cannot open it", retries)
    try:
        version = retrying(lambda: ShardVersion.of(fd), f"{place}: cannot read it", retries)
        return version.size, version.content
    finally:
        os.close(fd)


def _opened(place: Origin, retries: int) -> io.RawIOBase:
    if isinstance(place, Command):
        return CommandBytes(place)
    if isinstance(place, Url):
        return WebBytes(place, retries) if place.scheme in WEB else _ObjectBytes(place, retries)
    return _FileBytes(place, retries)


def _decompressed(place: Origin, raw: io.BufferedReader) -> io.BufferedIOBase:
    first = raw.peek(6)
    if first.startswith(_GZIP):
        return gzip.GzipFile(fileobj=cast(Any, _AsItComes(raw)))
    if first.startswith(_ZSTD):
        try:
            import pyarrow
        except ImportError as error:
            raise MissingLibrary(
                f"{place}: it is compressed by zstd, which needs the extra `parquet` (pyarrow): run "
                "`pip install 'mimo-train[parquet]'`"
            ) from error
        return _Zstd(place, pyarrow.CompressedInputStream(raw, "zstd"))
    for magic, name in _OTHERS.items():
        if first.startswith(magic):
            raise DataError(
                f"{place}: is compressed by {name}, and gzip and zstd are read: decompress it, or let a command do so: "
                f"data.shards='pipe:{name} -dc FILE'"
            )
    return raw


class _AsItComes:
    """Reads that give what is there: an error behind it is not raised before it."""

    def __init__(self, raw: io.BufferedReader) -> None:
        self._raw = raw

    def read(self, size: int) -> bytes:
        return self._raw.read1(size)


class _Zstd(io.BufferedIOBase):
    """What pyarrow decompresses, with errors as those of gzip."""

    def __init__(self, place: Origin, file: Any) -> None:
        self._place, self._file = place, file

    def read1(self, size: int = -1) -> bytes:
        try:
            return self._file.read(size)
        except OSError as error:
            raise ShardError(
                f"{self._place}: the compressed data are damaged or end too early ({error}). Copy or write the shard "
                "again."
            ) from error
