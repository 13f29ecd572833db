"""What a user has -> the source that reads it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from data.build.columns import Columns
from data.build.members import Folders, Tars
from data.build.records_file import JSON, TABLES, RecordsFile
from data.build.samples import Source
from data.build.tables import Tables
from data.index.shard_names import refuse_compressed
from data.errors import DataError
from data.records.members import MEDIA
from data.text_format import listed
from data.records.members import kind_of

KINDS = ("records", "table", "tars", "files")
_ARROW = (".parquet", ".arrow")
_METADATA = ("metadata.jsonl", "metadata.csv")
_OTHERS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""JSON that describes a data set and has no records."""
_SPLITS = ("train", "training")


def find_source(path: Path, columns: Columns, kind: str = "", media: Path | None = None, split: str = "") -> Source:
    """The source at a path.

    Args:
        kind: one of `KINDS`; empty: what the path shows.
        media: folder of the files that records name; None: that of the records.
        split: of a data set in several splits; empty: train, where there is more than one.

    Raises:
        DataError: nothing there can be read, or there are several things.
    """
    if not path.exists():
        raise DataError(f"no file or folder {path}")
    if media is not None and not media.is_dir():
        raise DataError(f"no folder {media} with the files that the records name")
    if columns.quoted and path.suffix.lower() != ".tsv":
        raise DataError(f"--quoted applies to a TSV file, and {path} is not one. Leave it out")
    if path.is_file():
        return _of_file(path, columns, kind, media)
    folder = path / split if split and (path / split).is_dir() else path
    if folder != path:
        split = ""
    found = _kinds_in(folder)
    if kind:
        found = {name: files for name, files in found.items() if name == kind}
    for name in KINDS:
        if files := found.get(name):
            return _of_folder(name, folder, files, columns, media, split)
    seen = sorted(entry.name for entry in folder.iterdir())
    for name in seen:
        refuse_compressed(folder / name)
    raise DataError(
        f"{folder} holds nothing to build shards of{f' as --kind {kind}' if kind else ''}: sought are a JSON, JSONL, "
        "CSV or TSV file of records, parquet or Arrow files, tars, or pictures and clips beside files of the same "
        "name; "
        f"it has {listed(seen, 5) or 'nothing'}"
    )


def _of_file(path: Path, columns: Columns, kind: str, media: Path | None) -> Source:
    refuse_compressed(path)
    suffix = path.suffix.lower()
    of_file = "records" if suffix in (*JSON, *TABLES) else "table" if suffix in _ARROW else "tars"
    if suffix not in (*JSON, *TABLES, *_ARROW, ".tar") or (kind and kind != of_file):
        known = ", ".join((*JSON, *TABLES, *_ARROW, ".tar"))
        raise DataError(f"{path} cannot be read{f' as --kind {kind}' if kind else ''}: files are {known}, or a folder")
    return _made(of_file, [path], columns, media, path.parent)


def _kinds_in(folder: Path) -> dict[str, list[Path]]:
    """By kind, the files of a folder, or the folders with files, that may be the source."""
    top = sorted(entry for entry in folder.iterdir() if entry.is_file() and entry.name[0] != ".")
    if any(path.name in _METADATA for path in top):
        return {"records": [path for path in top if path.name in _METADATA]}
    if tars := [path for path in top if path.suffix == ".tar"]:
        return {"tars": tars}
    below = sorted(path for path in folder.rglob("*") if "/." not in f"/{path.relative_to(folder)}")
    if tfrecords := [path for path in below if ".tfrecord" in path.name]:
        raise DataError(f"{tfrecords[0]}: TFRecord is not read: write WebDataset tars, files or parquet instead")
    found: dict[str, list[Path]] = {}
    tables = [path for path in below if path.suffix in _ARROW and path.is_file() and not path.name.startswith("cache-")]
    # Beside folders of files img2dataset writes a parquet of the same name, without the pictures.
    if tables and not all((path.parent / path.stem).is_dir() for path in tables):
        found["table"] = tables
    records = [
        path
        for path in top
        if path.suffix.lower() in (*JSON, *TABLES)
        and path.name not in _OTHERS
        and not path.name.endswith("_stats.json")
    ]
    media = [path for path in below if kind_of(path.suffix[1:].lower()) != "other" and path.is_file()]
    if records and not {path.with_suffix("") for path in records} & {path.with_suffix("") for path in media}:
        found["records"] = records
    inner = [path for path in below if path.name in _METADATA]
    if media and inner and not found:
        raise DataError(
            f"{folder}: {inner[0].name} is in {listed([str(path.parent.relative_to(folder)) for path in inner])}. "
            "Give the folder that it is in as SOURCE"
        )
    if media:
        found["files"] = sorted({path.parent for path in media})
    return found


def _of_folder(
    kind: str, folder: Path, files: Sequence[Path], columns: Columns, media: Path | None, split: str
) -> Source:
    if kind == "table":
        files = _split(folder, files, split)
    elif split:
        raise DataError(f"--split {split}: {folder} has no folder of this name")
    if kind == "records" and len(files) > 1:
        raise DataError(
            f"{folder} has {len(files)} files of records: name one of {listed([one.name for one in files])}"
        )
    if kind == "files":
        _require_no_media_options(columns, media, folder)
        return Folders(folder, files, columns)
    return _made(kind, files, columns, media, folder)


def _made(kind: str, files: Sequence[Path], columns: Columns, media: Path | None, folder: Path) -> Source:
    if kind == "records":
        return RecordsFile(files[0], media or folder, columns)
    if kind == "table":
        return Tables(files, media or folder, columns)
    _require_no_media_options(columns, media, files[0])
    return Tars(files, columns)


def _require_no_media_options(columns: Columns, media: Path | None, path: Path) -> None:
    """Raise DataError for options that say where media are, where samples have them as files."""
    if media is not None:
        raise DataError(f"--media {media}: the media of {path} are files next to their texts. Leave it out")
    for kind in MEDIA:
        if kind in columns.names:
            raise DataError(f"--columns {kind}={columns.names[kind]}: the media of {path} are files. Leave it out")


def _split(folder: Path, files: Sequence[Path], wanted: str) -> Sequence[Path]:
    """The files of one split: those in a folder of its name, or named `SPLIT-...`, as Hugging Face writes them."""
    of_split: dict[str, list[Path]] = {}
    for path in files:
        inside = path.relative_to(folder)
        name = next((part for part in inside.parts[:-1] if part != "data"), "") or inside.stem.split("-")[0]
        of_split.setdefault(name, []).append(path)
    if wanted:
        if wanted not in of_split:
            raise DataError(f"--split {wanted}: {folder} has {', '.join(sorted(of_split))}")
        return of_split[wanted]
    # Numbers, as of img2dataset, are no splits.
    if len(of_split) == 1 or all(name.isdecimal() for name in of_split):
        return files
    for name in _SPLITS:
        if name in of_split:
            return of_split[name]
    raise DataError(f"{folder} has the splits {', '.join(sorted(of_split))}: say which with --split")


def fingerprint(source: Source) -> list[tuple[str, int, int]]:
    """(path, size, time of modification) of the parts: whether they are those of an earlier start."""
    found = []
    for part in source.parts:
        at = os.stat(part)
        found.append((str(part.resolve()), at.st_size if part.is_file() else 0, at.st_mtime_ns))
    return found
