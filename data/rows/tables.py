"""Arrow tables: parquet files, and the files of `save_to_disk` of Hugging Face datasets."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.media.headers import extension_of
from data.records.members import READABLE

_ROWS = 32  # per batch: each may hold images of megabytes


@dataclass(frozen=True)
class Layout:
    """Columns of a parquet or Arrow file."""

    names: Sequence[str]
    media: Mapping[str, str]
    """Column -> kind, for media columns by type."""
    labels: Mapping[str, Sequence[str]]
    """Column of class numbers -> class names."""
    dropped: Sequence[str]
    """Columns with bytes of unknown kind."""

    @classmethod
    def of(cls, file: Path) -> Layout:
        """Read the layout of a file. Raises DataError."""
        with _opened_table(file) as table:
            return cls.of_schema(table.schema_arrow if file.suffix == ".parquet" else table.schema)

    @classmethod
    def of_schema(cls, schema: Any) -> Layout:
        """Return the layout by Hugging Face's feature metadata, or by column types."""
        try:
            features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        except (KeyError, ValueError, TypeError):
            features = {}
        media: dict[str, str] = {}
        labels, dropped = {}, []
        for column in schema:
            feature = _inner_feature(features.get(column.name))
            kind = feature.get("_type", "").lower()
            kind = kind if kind in READABLE else _kind_of_type(column)
            if kind == "bytes":
                dropped.append(column.name)
            elif kind:
                media[column.name] = kind
            elif feature.get("_type") == "ClassLabel" and isinstance(feature.get("names"), list):
                labels[column.name] = feature["names"]
        return cls(schema.names, media, labels, dropped)


def require_known_media(rows: Sequence[Mapping[str, Any]], where: str, remedy: str) -> None:
    """Raise DataError if columns with bytes of unknown kind hold files of media. `remedy`: what to do with COLUMN."""
    for row in rows:
        for name, value in row.items():
            if isinstance(value, bytes) and (extension := extension_of(value)):
                remedy = remedy.replace("COLUMN", name)
                raise DataError(f"{where}: {name!r} holds files ({extension}) that are not read. {remedy}")


def _inner_feature(feature: Any) -> dict[str, Any]:
    if isinstance(feature, list) and feature:
        feature = feature[0]
    if isinstance(feature, dict) and feature.get("_type") in ("Sequence", "List", "LargeList"):
        feature = feature.get("feature")
    return feature if isinstance(feature, dict) else {}


def _kind_of_type(column: Any) -> str:
    """Return the media kind of a column by name and type: `bytes` if unknown, "" if none."""
    from pyarrow import types

    kind = column.type
    while (
        types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind) or types.is_dictionary(kind)
    ):
        kind = kind.value_type
    name = column.name.lower()
    by_name = next(
        (kind for kind, extensions in READABLE.items() if name.rpartition(".")[2] in extensions or kind in name), ""
    )
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return by_name or "bytes"
    fields = {field.name for field in kind} if types.is_struct(kind) else set()
    if fields >= {"array", "sampling_rate"}:
        return "audio"
    return by_name or "image" if fields >= {"bytes", "path"} else ""


def labelled(value: Any, names: Sequence[str] | None) -> Any:
    """Return the class name of a number, or of each in a list."""
    if names is None:
        return value
    if isinstance(value, list):
        return [labelled(number, names) for number in value]
    if not isinstance(value, int):
        return value
    return names[value] if 0 <= value < len(names) else None


@contextmanager
def _opened_table(file: Path) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        if file.suffix == ".parquet":
            # pre_buffer would read a whole row group, of any size.
            with pyarrow.parquet.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False) as table:
                yield table
        else:
            with pyarrow.memory_map(str(file)) as mapped:
                yield pyarrow.ipc.open_stream(mapped)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error


def batches(file: Path, columns: Sequence[str]) -> Iterator[Any]:
    """Yield record batches of a few rows. Raises DataError."""
    with _opened_table(file) as table:
        if file.suffix == ".parquet":
            yield from table.iter_batches(batch_size=_ROWS, columns=list(columns))
            return
        for batch in table:
            batch = batch.select(list(columns))
            for start in range(0, batch.num_rows, _ROWS):
                yield batch.slice(start, _ROWS)
