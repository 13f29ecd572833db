"""The members of an uncompressed tar, in order: ustar, GNU and pax, by their headers.

`tarfile` is not used: it stops silently at a damaged header, loops forever on a negative size, and reads names of any
claimed length. Here every step advances by at least a header, and every header is checked against the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn

from data.errors import ShardError
from data.text_format import shown

ReadRange = Callable[[int, int], bytes]
"""(bytes, offset) -> content, fewer bytes at the end of the file."""

_BLOCK = 512  # bytes: headers and contents are aligned to it
_END = 2 * _BLOCK  # bytes of zeros that end a tar
_ZEROS = bytes(_BLOCK)
_AHEAD = 1 << 16  # bytes read at once if the next header is near; else a page
_LARGEST_EXTRA = 1 << 20  # bytes of a long name or of a pax header
_LONGEST_END = 64 << 20  # maximum zeros at the end of a stream
_REGULAR, _OLD_REGULAR, _FOLDER = "07", "\0", "5"
_KINDS = {
    "1": "a hard link",
    "2": "a symbolic link",
    "3": "a device",
    "4": "a device",
    "6": "a FIFO",
    "D": "a folder of an incremental dump",
    "M": "a part of a file in several tars",
    "S": "a sparse file",
}
"""Types of members without content in the shard."""
_DECIMAL = re.compile(rb"[0-9]{1,20}")
_OCTAL = re.compile(rb"[0-7]*")


def walk_tar(path: object, read: ReadRange, size: int | None) -> Iterator[tuple[str, int, int]]:
    """Yield (name, offset, bytes) of every regular member of the tar `path` of `size` bytes.

    Reads never go backwards, so `read` may be of a stream of unknown size (None). Then the reader of a member must
    check that it is complete.

    Raises:
        ShardError: the tar is empty, truncated, damaged or compressed, a header is invalid, or a member is a link, a
            sparse file, a device or a FIFO. The message has shard, byte and member.
    """
    window, at, extra = _Window(read), 0, _Extra()
    if size == 0 or (size is None and not window.block(0)):
        raise ShardError(f"{path}: the file is empty (0 bytes). Write or copy it again.")
    while size is None or at + _BLOCK <= size:
        header = window.block(at)
        if len(header) < _BLOCK or header == _ZEROS:
            break
        if not _is_header(header):
            if at == 0:
                raise ShardError(
                    f"{path}: not a readable uncompressed tar{_of(size)} (no header at byte 0). Copy or write the "
                    "shard again; of files of another kind `mimo-train shards build` makes shards."
                )
            break
        kind = chr(header[156])
        name = extra.name if extra.name is not None else _name(header)
        length = _number(header[124:136]) if extra.size is None else extra.size
        if length is None or length < 0:
            said = "its length is negative" if length else "its length is no number"
            _refuse(path, at, name, said, header[124:136])
        if kind == _FOLDER or (kind == _OLD_REGULAR and name.endswith("/")):
            length = 0
        start = at + _BLOCK
        following = start + -(-length // _BLOCK) * _BLOCK
        if size is not None and start + length > size:
            raise truncated(path, name, size, start + length - size)
        if kind in "LKxXg":
            if length > _LARGEST_EXTRA:
                _refuse(path, at, name, f"{length} bytes of names or attributes, at most {_LARGEST_EXTRA} are read")
            extra.add(path, at, kind, read(length, start))
        else:
            if extra.sparse or kind in _KINDS or kind not in _REGULAR + _OLD_REGULAR + _FOLDER + "V":
                what = "a sparse file" if extra.sparse else _KINDS.get(kind, f"of the unknown type {kind!r}")
                _refuse(path, at, name, f"is {what}, not a file with its content")
            if kind in _REGULAR + _OLD_REGULAR and not name.endswith("/"):
                yield name, start, length
            extra = _Extra()
        at = following
    if extra.begun and (size is None or at + _BLOCK <= size) and window.block(at) == _ZEROS:
        raise ShardError(
            f"{path}: damaged header at byte {at}{_of(size)} (a long name without its member). Copy or write the shard "
            "again."
        )
    _require_end(path, read, at, size)


def truncated(path: object, name: str, size: int, missing: int) -> ShardError:
    """Return the error of a tar of `size` bytes that ends within a member."""
    return ShardError(
        f"{path}: truncated at {size} bytes: {missing} bytes of member {shown(name)!r} are missing. Copy or write the "
        "shard again."
    )


def _of(size: int | None) -> str:
    return "" if size is None else f" of {size} bytes"


@dataclass
class _Extra:
    """Attributes of a member from headers before its own."""

    name: str | None = None
    size: int | None = None
    sparse: bool = False
    begun: bool = False

    def add(self, path: object, at: int, kind: str, content: bytes) -> None:
        """Add a GNU long name (L; K: of a link) or a pax header (x; g: for the whole shard)."""
        self.begun = self.begun or kind != "g"
        if kind == "L":
            self.name = _text(content.split(b"\0", 1)[0])
        for key, value in _pax_records(path, at, content) if kind in "xXg" else ():
            if key.startswith(b"GNU.sparse."):
                self.sparse = True
            elif key not in (b"path", b"size"):
                continue
            elif kind == "g":
                _refuse(path, at, "", f"gives all members one {key.decode()}")
            elif key == b"path":
                self.name = _text(value)
            elif _DECIMAL.fullmatch(value):
                self.size = int(value)
            else:
                _refuse(path, at, self.name or "", "its length is no number, or negative", value)


def _pax_records(path: object, at: int, content: bytes) -> Iterator[tuple[bytes, bytes]]:
    place = 0
    while place < len(content) and content[place]:
        digits, _, _ = content[place : place + 12].partition(b" ")
        length = int(digits) if _DECIMAL.fullmatch(digits) else 0
        record = content[place : place + length]
        key, equals, value = record[len(digits) + 1 : -1].partition(b"=")
        if length <= len(digits) + 1 or len(record) < length or record[-1:] != b"\n" or not equals:
            _refuse(path, at, "", "a pax header that cannot be read", content[place : place + 32])
        yield key, value
        place += length


def _refuse(path: object, at: int, name: str, said: str, raw: bytes = b"") -> NoReturn:
    member = f"member {shown(name)!r}" if name else "a header"
    raise ShardError(
        f"{path}: {member} at byte {at}: {said}{f' ({raw[:32]!r})' if raw else ''}. Write the shard again, of plain "
        "files."
    )


def _is_header(header: bytes) -> bool:
    """True if the checksum is right: of unsigned bytes, or of signed ones as by old programs."""
    said = _number(header[148:156])
    total = sum(header) - sum(header[148:156]) + 8 * ord(" ")
    if said is None or said == total:
        return said == total
    rest = header[:148] + header[156:]
    return said == total - 256 * sum(byte > 127 for byte in rest)


def _number(field: bytes) -> int | None:
    """Return octal digits, or GNU's base 256, which may be negative; None if it is neither."""
    if field[0] in (0x80, 0xFF):
        value = int.from_bytes(field[1:], "big")
        return value - (1 << 8 * (len(field) - 1)) if field[0] == 0xFF else value
    digits = field.split(b"\0", 1)[0].strip()
    if digits.startswith(b"-") and _OCTAL.fullmatch(digits[1:]):
        return -int(digits[1:] or b"0", 8)
    return int(digits or b"0", 8) if _OCTAL.fullmatch(digits) else None


def _name(header: bytes) -> str:
    name = header[:100].split(b"\0", 1)[0]
    if header[257:263] == b"ustar\0" and header[345]:
        name = header[345:500].split(b"\0", 1)[0] + b"/" + name
    return _text(name)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


class _Window:
    """Reads headers in order: ahead if members are small, alone if they are far apart."""

    def __init__(self, read: ReadRange) -> None:
        self._read, self._start, self._bytes = read, 0, b""

    def block(self, at: int) -> bytes:
        offset = at - self._start
        if offset + _BLOCK > len(self._bytes):
            near = offset <= len(self._bytes) + _AHEAD
            self._start, self._bytes, offset = at, self._read(_AHEAD if near else 4096, at), 0
        return self._bytes[offset : offset + _BLOCK]


def _require_end(path: object, read: ReadRange, end: int, size: int | None) -> None:
    """Raise ShardError unless only zeros, and enough of them, follow byte `end`."""
    zeros, most = 0, _LONGEST_END if size is None else size - end
    while zeros < most:
        chunk = read(min(1 << 20, most - zeros), end + zeros)
        if not chunk:
            break
        filled = len(chunk.lstrip(b"\0"))
        if filled and (size is None or size - end >= _BLOCK):
            at = end + zeros + len(chunk) - filled
            raise ShardError(
                f"{path}: damaged header at byte {end}{_of(size)} (no end mark; data at byte {at}): the samples behind "
                "it cannot be read. Copy or write the shard again."
            )
        zeros += len(chunk)
    if size is None and zeros >= _LONGEST_END:
        raise ShardError(
            f"{path}: {zeros} zero bytes behind its last member, at byte {end}: no tar ends like that. Write the shard "
            "again."
        )
    if zeros < _END:  # or truncated within a header
        raise ShardError(
            f"{path}: truncated at {end + zeros if size is None else size} bytes: a tar ends in {_END} zero bytes, "
            f"this one in {zeros}. Samples may be missing; copy or write the shard again."
        )
