"""Tables of Arrow: parquet and `save_to_disk` of Hugging Face datasets, with features of pictures and audio; parquet of
img2dataset. Media become bytes; everything else of a row stays in its record."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from data.build.columns import Columns
from data.build.samples import Sample, sample_of
from data.build.values import FILE_NAME, extension_of, kind_of_file_name, media_columns, media_in
from data.errors import DataError, NotDownloaded
from data.records.members import READABLE
from data.records.record_checks import failed_download
from data.text_format import shown

_ROWS = 32  # read at once: each may hold pictures of megabytes


@dataclass(frozen=True)
class Tables:
    """Parquet or Arrow files with the same columns.

    Attributes:
        media: folder of the files that rows name without their bytes.
    """

    files: Sequence[Path]
    media: Path
    columns: Columns

    @property
    def what(self) -> str:
        """Them, for messages."""
        return str(self.files[0].parent)

    @property
    def parts(self) -> Sequence[Path]:
        """The files."""
        return self.files

    def notes(self) -> Sequence[str]:
        """The columns that no record keeps. Raises DataError if the only media are in one of them."""
        layout = self._layout(self.files[0])
        if layout.dropped and not layout.media:
            for row in next(_batches(self.files[0], [*layout.dropped])).to_pylist():
                for name, value in row.items():
                    if extension := extension_of(value or b""):
                        raise DataError(
                            f"{self.files[0]}: {name!r} holds files ({extension}) that are not read. Give --columns "
                            f"image={name}, or video or audio"
                        )
        return [f"the column {name!r} is left out: {why}" for name, why in layout.dropped.items()]

    def rows(self, part: Path) -> Iterator[tuple[str, Callable[[], Sample | None]]]:
        """Every row of a file."""
        layout, number = self._layout(part), 0
        read = [*layout.media, *layout.kept]
        for batch in _batches(part, read):
            for row in batch.to_pylist():
                where = f"{part.name}: row {number}"
                yield where, partial(self._sample, layout, row, where)
                number += 1

    def _layout(self, part: Path) -> _Layout:
        schema = _schema(part)
        self.columns.require(schema.names, str(part))
        layout = _Layout.of(schema)
        media = {name: kind for name, kind in layout.media.items() if kind not in self.columns.names}
        for kind in READABLE:
            names = self.columns.media(kind, media_columns(tuple(schema.names), kind))
            if kind in media.values():  # image_url next to the images says where they are from
                names = [name for name in names if name.lower() in (kind, f"{kind}s")]
            media |= dict.fromkeys(names, kind)
        return _Layout(
            {name: media[name] for name in schema.names if name in media},
            [name for name in layout.kept if name not in media],
            layout.labels,
            {name: why for name, why in layout.dropped.items() if name not in media},
        )

    def _sample(self, layout: _Layout, row: dict[str, Any], where: str) -> Sample | None:
        media = []
        record = {name: _labelled(row[name], layout.labels.get(name)) for name in layout.kept}
        columns = layout.media
        if not columns and (kind := kind_of_file_name(record)):
            columns = {FILE_NAME: kind}
        for name, kind in columns.items():
            found = media_in(kind, name, row[name], str(self.media), where)
            media += found
            if names := [medium.name for medium in found]:
                record[name] = names if isinstance(row[name], list) else names[0]
        if not media and layout.media and failed_download(row):
            raise NotDownloaded(f"{where}: {shown(str(row.get('error_message')))}")
        called = next((row[one] for one in ("key", "id") if isinstance(row.get(one), str)), "")
        alone = not columns
        return sample_of(record, media, self.columns, where, name=called, alone=alone, folder=str(self.media))


@dataclass(frozen=True)
class _Layout:
    """The columns of a table, by what becomes of them."""

    media: Mapping[str, str]
    """column -> kind."""
    kept: Sequence[str]
    labels: Mapping[str, Sequence[str]]
    """column -> the names of its classes."""
    dropped: Mapping[str, str]
    """column -> why."""

    @classmethod
    def of(cls, schema: Any) -> _Layout:
        """By the features that Hugging Face's metadata describe, else by the types of columns."""
        try:
            features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        except (KeyError, ValueError, TypeError):
            features = {}
        media: dict[str, str] = {}
        labels, dropped, kept = {}, {}, []
        for column in schema:
            feature = _inner(features.get(column.name))
            kind = feature.get("_type", "")
            if kind in ("Image", "Video", "Audio"):
                media[column.name] = kind.lower()
            elif found := _media_kind(column):
                media[column.name] = found
            elif _is_binary(column.type):
                dropped[column.name] = "bytes of no kind that is known; --columns image=NAME (video, audio) says what"
            else:
                kept.append(column.name)
                if kind == "ClassLabel" and isinstance(feature.get("names"), list):
                    labels[column.name] = feature["names"]
        return cls(media, kept, labels, dropped)


def _inner(feature: Any) -> dict[str, Any]:
    """A feature, or that of a list's items."""
    if isinstance(feature, list) and feature:
        feature = feature[0]
    if isinstance(feature, dict) and feature.get("_type") in ("Sequence", "List", "LargeList"):
        feature = feature.get("feature")
    return feature if isinstance(feature, dict) else {}


def _media_kind(column: Any) -> str | None:
    """By its name and type: bytes named as their ending, or bytes with the path of their file."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    last = column.name.rpartition(".")[2].lower()
    of_name = next((one for one, known in READABLE.items() if last in known or one in column.name.lower()), None)
    if _is_binary(kind):
        return of_name
    if pa.types.is_struct(kind):
        fields = {field.name for field in kind}
        if fields >= {"array", "sampling_rate"}:
            return "audio"
        if fields >= {"bytes", "path"}:
            return of_name or "image"
    return None


def _is_binary(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)


def _labelled(value: Any, names: Sequence[str] | None) -> Any:
    """The name of a class, by its number; of each in a list."""
    if names is not None and isinstance(value, list):
        return [_labelled(one, names) for one in value]
    if names is None or not isinstance(value, int):
        return value
    return names[value] if 0 <= value < len(names) else None


def _arrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            "parquet and Arrow files are read by pyarrow, which is not installed: pip install 'mimo-train[parquet]'"
        ) from error
    return pyarrow


def _schema(part: Path) -> Any:
    pyarrow = _arrow()
    try:
        if part.suffix == ".parquet":
            return pyarrow.parquet.read_schema(part)
        with pyarrow.memory_map(str(part)) as source:
            return pyarrow.ipc.open_stream(source).schema
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{part}: cannot be read: {error}") from error


def _batches(part: Path, columns: Sequence[str]) -> Iterator[Any]:
    """Few rows at a time: a row group is as large as its writer liked."""
    pyarrow = _arrow()
    try:
        if part.suffix == ".parquet":
            # Without pre_buffer, which reads a row group whole, memory does not grow with the size of row groups.
            with pyarrow.parquet.ParquetFile(part, buffer_size=1 << 20, pre_buffer=False) as file:
                yield from file.iter_batches(batch_size=_ROWS, columns=list(columns))
            return
        with pyarrow.memory_map(str(part)) as source:
            for batch in pyarrow.ipc.open_stream(source):
                batch = batch.select(list(columns))
                for start in range(0, batch.num_rows, _ROWS):
                    yield batch.slice(start, _ROWS)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{part}: cannot be read: {error}") from error
