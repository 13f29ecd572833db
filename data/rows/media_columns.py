"""Columns of a row that name or hold media."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from data.errors import RecordError
from data.records.members import READABLE
from data.rows.media_values import EMPTY, FILE_NAME, MediaItem, kind_of_file_name, media_columns, read_items


def media_of_row(
    row: dict[str, Any], typed: Mapping[str, str], names: Mapping[str, str], folder: str, where: str
) -> tuple[dict[str, Any], list[MediaItem], bool]:
    """Return (the record, with file names in place of media; the media; True if no column is for media).

    Args:
        typed: column -> kind, by column type.
        names: `Columns.names`.
        folder: folder of the files that columns name.

    Raises:
        RecordError: a medium cannot be read, or several columns have media of one kind.
    """
    columns, text_only = _media_columns(row, typed, names, where)
    record, items = row, list[MediaItem]()
    for column, kind in columns.items():
        value = row[column]
        column_items = read_items(kind, column, value, folder, where)
        items += column_items
        if file_names := [item.name for item in column_items]:
            record = record | {column: file_names if isinstance(value, list) else file_names[0]}
        elif isinstance(value, dict):  # with empty fields
            record = {name: other for name, other in record.items() if name != column}
    return record, items, text_only


def columns_by_name(
    columns: Collection[str], typed: Mapping[str, str], names: Mapping[str, str], kind: str
) -> list[str]:
    """Return the columns that names tell to be of a media kind."""
    if kind in names:
        return [names[kind]]
    usual = media_columns(tuple(columns), kind)
    if kind in typed.values():  # image_url next to an image is its origin
        usual = [name for name in usual if name.lower() in (kind, f"{kind}s")]
    return [*usual]


def _media_columns(
    row: dict[str, Any], typed: Mapping[str, str], names: Mapping[str, str], where: str
) -> tuple[dict[str, str], bool]:
    """Return (column -> kind of a row's media, True if it has no media columns)."""
    columns = {column: kind for column, kind in typed.items() if kind not in names}
    text_only = not columns and FILE_NAME not in row
    for kind in READABLE:
        if kind in names and names[kind] not in row:
            raise RecordError(f"{where} has no {names[kind]!r}; it has {', '.join(sorted(row)[:8])}")
        usual = [name for name in columns_by_name(row, typed, names, kind) if name not in columns]
        text_only = text_only and not usual
        filled = [name for name in usual if row[name] not in EMPTY]
        if len(filled) > 1:
            raise RecordError(f"{where}: has both {' and '.join(filled)}")
        if not filled and not columns and kind not in names and kind_of_file_name(row) == kind:
            filled = [FILE_NAME]
        columns |= dict.fromkeys(filled, kind)
    return columns, text_only
