"""Rows of parquet files as samples: indexing them, and reading single rows by row groups.

A row has a member for each of its media, in the order of their placeholders, and `json`, its other columns. The
"offset" of a member is row * MOST_MEMBERS + its place in the row. Columns of text and of media are read apart.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

from data.errors import DataError, RecordError, ShardError
from data.records.members import READABLE
from data.rows.media_values import (
    FILE_NAME,
    FileRange,
    MediaItem,
    columns_by_name,
    encode_record,
    media_of_row,
    require_no_media,
    take_typed_parts,
    with_typed_media,
)
from data.rows.segments import SEGMENT_COLUMNS, cut_items
from data.rows.tables import Layout, labelled, require_known_media
from data.storage.files import READS, RangeFile, ReadRange, ShardVersion
from data.storage.reader import ShardReader
from data.storage.url import Place
from data.text_format import shown

CACHE_BYTES = 256 << 20
"""Maximum bytes of decoded row groups that a reader keeps, besides the newest."""
MOST_MEMBERS = 1 << 20
_UNUSABLE = MOST_MEMBERS - 1
"""Place of the record of a row whose media cannot be used: reading it raises the reason."""
_OPEN_TABLES = 256
_ROWS, _INDEXED_ROWS = 256, 32  # that are decoded together: each may hold images of megabytes


def is_table(shard: Place) -> bool:
    """True for a parquet file, False for a tar."""
    return shard.name.endswith(".parquet")


class Table:
    """An open parquet file."""

    def __init__(self, path: Place, read: ReadRange, size: int) -> None:
        """Read the end of the file, of `size` bytes. Raises ShardError if it is damaged, or repeats a column."""
        self.path, self._size = path, size
        try:
            with _damage():
                file = self._open(read)
                self.metadata, self.layout = file.metadata, Layout.of_schema(file.schema_arrow)
        except RecordError as error:
            raise ShardError(
                f"{path}: not a readable parquet file of {size} bytes ({error}). Write it again."
            ) from error
        counts = [self.metadata.row_group(group).num_rows for group in range(self.metadata.num_row_groups)]
        self.ends = [*accumulate(counts)]
        names, typed = self.layout.names, self.layout.media
        if twice := [name for at, name in enumerate(names) if name in names[:at]]:
            raise ShardError(f"{path}: the column {twice[0]!r} is there twice. Write it under one name")
        by_name = [name for kind in READABLE for name in columns_by_name(names, typed, {}, kind)]
        media = {*typed, *by_name, FILE_NAME}
        self.text_only = media.isdisjoint(names)
        """True if no column is for media."""
        names = [name for name in names if name not in self.layout.dropped]
        # Typed parts of messages may have media, and names of files and their segments are text too.
        self.media_columns = [name for name in names if name in media or name in ("messages", *SEGMENT_COLUMNS)]
        self.text_columns = [name for name in names if name not in media or name == FILE_NAME]

    def place(self, row: int) -> tuple[int, int]:
        """Return (row group, row in it) of a row."""
        group = bisect.bisect_right(self.ends, row)
        return group, row - (self.ends[group - 1] if group else 0)

    def read_group(self, group: int, columns: Sequence[str], read: ReadRange) -> Any:
        """Return columns of a row group, a pyarrow.Table. Raises RecordError if it is damaged."""
        import pyarrow

        with _damage(f"row group {group} cannot be decoded: "):
            # pyarrow cannot read 2 GiB of nested bytes in one piece.
            batches = self._open(read).iter_batches(_ROWS, [group], columns, use_threads=False)
            return pyarrow.Table.from_batches(batches)

    def batches(self, group: int, read: ReadRange) -> Iterator[Any]:
        """Yield all columns of a row group in batches of a few rows. Raises RecordError if it is damaged."""
        columns = dict.fromkeys([*self.text_columns, *self.media_columns])
        with _damage():
            file = self._open(read, buffer_size=1 << 20)
            yield from file.iter_batches(_INDEXED_ROWS, [group], [*columns], use_threads=False)

    def record(self, rows: Any, at: int) -> dict[str, Any]:
        """Return a row of a table or batch, with names in place of class numbers. Raises RecordError."""
        with _damage():
            row = rows.slice(at, 1).to_pylist() or [{}]  # without columns
        return {name: labelled(value, self.layout.labels.get(name)) for name, value in row[0].items()}

    def items(self, row: dict[str, Any], where: str) -> tuple[dict[str, Any], Sequence[MediaItem]]:
        """Return a row with names in place of media, and its media. Raises RecordError if they cannot be used."""
        folder = str(self.path.parent)
        record, of_columns, _ = media_of_row(row, self.layout.media, {}, folder, where)
        record, items = with_typed_media(record, of_columns, "messages", folder, where)
        items = cut_items(record, items, {}, where)
        if not items:
            require_no_media(row, {}, where, folder)
        return record, items

    def require_known_media(self, read: ReadRange) -> None:
        """Raise ShardError if the only media are in columns with bytes of unknown kind."""
        if not (self.text_only and self.layout.dropped and self.ends and self.ends[-1]):
            return
        remedy = "Rename it to image, video or audio, or run `mimo-train shards build --columns image=COLUMN`"
        try:
            with _damage():
                batch = next(self._open(read).iter_batches(_INDEXED_ROWS, columns=list(self.layout.dropped)))
            require_known_media(batch.to_pylist(), str(self.path), remedy)
        except RecordError:  # reading will name it
            pass
        except DataError as error:
            raise ShardError(str(error)) from error

    @property
    def group_rows(self) -> int:
        """The rows of the largest row group."""
        return max((end - start for start, end in pairwise([0, *self.ends])), default=0)

    def _open(self, read: ReadRange, **options: Any) -> Any:
        from pyarrow.parquet import ParquetFile

        metadata = getattr(self, "metadata", None)
        options |= {"pre_buffer": False, "page_checksum_verification": True}  # pre_buffer holds a group twice
        return ParquetFile(RangeFile(read, self._size), metadata=metadata, **options)


@contextmanager
def _damage(prefix: str = "") -> Iterator[None]:
    """Convert errors of pyarrow to RecordError. Those for damaged bytes are OSErrors, which reading never raises."""
    import pyarrow

    try:
        yield
    except DataError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise RecordError(f"{prefix}{' '.join(str(error).split())}") from error


def table_rows(path: Place, read: ReadRange, size: int) -> Iterator[tuple[str, list[tuple[str, int, bytes]]]]:
    """Yield (key, members) of the rows of a parquet file, to be indexed. A member is (extension, "offset", content).
    Raises ShardError if the file is damaged as a whole."""
    table = Table(path, read, size)
    table.require_known_media(read)
    for group, end in enumerate(table.ends):
        row = table.ends[group - 1] if group else 0
        first = row
        try:
            for batch in table.batches(group, read):
                for at in range(batch.num_rows):
                    key = _key(group, row - first)
                    yield key, _members(table, batch, at, row, key)
                    row += 1
        except RecordError:  # reading will name it
            pass
        for unread in range(row, end):
            yield _key(group, unread - first), [("json", unread * MOST_MEMBERS + _UNUSABLE, b"")]


def _members(table: Table, batch: Any, at: int, row: int, key: str) -> list[tuple[str, int, bytes]]:
    first = row * MOST_MEMBERS
    try:
        record, items = table.items(table.record(batch, at), key)
        raw = encode_record({name: record[name] for name in table.text_columns}, key)
    except RecordError:
        return [("json", first + _UNUSABLE, b"")]
    members = []
    for place, item in enumerate(items):
        number = f"{place}." if len(items) > 1 else ""
        members.append((f"{number}{item.column}.{item.extension}", first + place, _bytes_of(item)))
    left_out = [(f"{name}.bin", first + len(items) + 1, b"") for name in table.layout.dropped]
    return [*members, ("json", first + len(items), raw), *left_out]


def _bytes_of(item: MediaItem) -> bytes:
    return item.content.read() if isinstance(item.content, FileRange) else item.content


def _key(group: int, row: int) -> str:
    return f"row group {group}, row {row}"


class RowReader(ShardReader):
    """Reads members of tars, and rows of parquet files. Decoded row groups are kept, up to `CACHE_BYTES`.

    Of parquet files, `bytes_read` has what was read as "parquet footer", "parquet text" and "parquet media".
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.table = lru_cache(_OPEN_TABLES)(
            lambda path, version: Table(path, self._range_reader(path, version, "parquet footer"), version.size)
        )
        """Return an indexed parquet file. Raises the errors of `ShardReader.read`, and ShardError."""
        self._groups: dict[tuple[Place, int, bool], Future[Any]] = {}  # the most recently used last
        self._guard = threading.Lock()

    def read(self, path: Place, offset: int, size: int, extension: str, version: ShardVersion | None = None) -> bytes:
        """Read a member. See `ShardReader.read`. Raises RecordError for a damaged row group."""
        if not is_table(path):
            return super().read(path, offset, size, extension, version)
        assert version is not None, "rows are read by an index"
        row, place = divmod(offset, MOST_MEMBERS)
        table, group, at = self._place(path, row, version)
        record = table.record(self._group(table, group, version, media=True), at)
        _, items = table.items(record, f"key {_key(group, at)!r}")
        content = _bytes_of(items[place])
        if len(content) != size:  # a file that the row names
            raise RecordError(f"member .{shown(extension)}: {len(content)} bytes, and {size} when it was indexed")
        return content

    def record(self, path: Place, offset: int, version: ShardVersion) -> tuple[dict[str, Any], bool]:
        """Return (the columns of a row without media, True if the file has no column for media). `offset`: of `json`.

        Raises the errors of `read`, and RecordError if the row cannot be used.
        """
        row, place = divmod(offset, MOST_MEMBERS)
        table, group, at = self._place(path, row, version)
        where = f"key {_key(group, at)!r}"
        record = table.record(self._group(table, group, version, media=False), at)
        if place == _UNUSABLE:
            complete = record | table.record(self._group(table, group, version, media=True), at)
            complete, _ = table.items(complete, where)
            encode_record({name: complete[name] for name in table.text_columns}, where)
            raise RecordError("a file that it names has changed since the shard was indexed. Index it again")
        return take_typed_parts(record, "messages", str(path.parent), where)[0], table.text_only

    def expect(self, ranges: Iterable[tuple[Place, int, int, ShardVersion]]) -> None:
        """Start to read ranges of tars. See `ShardReader.expect`."""
        super().expect(item for item in ranges if not is_table(item[0]))

    def close(self) -> None:
        """Close files, and forget announced ranges and row groups."""
        super().close()
        with self._guard:
            self._groups.clear()

    def _range_reader(self, path: Place, version: ShardVersion, what: str) -> ReadRange:
        return lambda length, offset: ShardReader.read(self, path, offset, length, what, version)

    def _place(self, path: Place, row: int, version: ShardVersion) -> tuple[Table, int, int]:
        table = self.table(path, version)
        return table, *table.place(row)

    def _group(self, table: Table, group: int, version: ShardVersion, *, media: bool) -> Any:
        """Return the columns of a row group. Threads that need the same wait for one that reads it."""
        key = table.path, group, media
        with self._guard:
            future = self._groups.pop(key, None)
            is_new, future = future is None, future or Future()
            self._groups[key] = future
        if is_new:
            read = self._range_reader(table.path, version, "parquet media" if media else "parquet text")
            columns = table.media_columns if media else table.text_columns
            try:
                future.set_result(table.read_group(group, columns, read))
            except BaseException as error:
                with self._guard:
                    self._groups.pop(key, None)
                future.set_exception(error)
            self._drop_old()
        with READS.of(table.path):
            return future.result()

    def _drop_old(self) -> None:
        with self._guard:
            read = {key: future for key, future in self._groups.items() if future.done() and future.exception() is None}
            done = {key: future.result().nbytes for key, future in read.items()}
            kept = sum(done.values())
            for key, size in list(done.items())[:-1]:
                if kept <= CACHE_BYTES:
                    break
                del self._groups[key]
                kept -= size
