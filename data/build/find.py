"""Find the source of shards at a path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from data.build.sources import ARROW, JSON, SEPARATORS, Source
from data.build.transcripts import KALDI, TRANSCRIPTS, require_one_corpus
from data.errors import DataError
from data.index.find_shards import TRAIN, refuse_compressed, split_files
from data.records.members import MEDIA, kind_of
from data.rows.samples import Columns
from data.rows.segments import SEGMENT
from data.text_format import listed

_METADATA = ("metadata.jsonl", "metadata.csv")
_NO_RECORDS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""JSON files that describe a dataset."""


def find_source(path: Path, columns: Columns, media: Path | None = None, split: str = "") -> Source:
    """Return the source of shards at a path.

    Args:
        media: folder of the files that records name; None: that of the records.
        split: split of a dataset; empty: train if there are several.

    Raises:
        DataError: there is no source, or there are several.
    """
    if not path.exists():
        raise DataError(f"no file or folder {path}")
    if media is not None and not media.is_dir():
        raise DataError(f"no folder {media} with the files that the records name")
    if columns.quoted and path.suffix.lower() != ".tsv":
        raise DataError(f"--quoted applies to a TSV file, and {path} is not one. Leave it out")
    folder, files = path.parent, [path]
    if path.is_file():
        refuse_compressed(path)
        suffix, readable = path.suffix.lower(), (*JSON, *SEPARATORS, *ARROW, ".tar")
        if suffix not in readable:
            raise DataError(f"{path} cannot be read: files are {', '.join(readable)}, or a folder")
        kind = "tars" if suffix == ".tar" else "table" if suffix in ARROW else "records"
    else:
        folder = path / split if split and (path / split).is_dir() else path
        kind, files = _source_in(folder)
        if kind == "table":
            files = _of_split(folder, files, split if folder == path else "")
        elif split and folder == path:
            raise DataError(f"--split {split}: {folder} has no folder of this name")
        if kind == "records" and len(files) > 1:
            names = listed([file.name for file in files])
            raise DataError(f"{folder} has {len(files)} files of records: name one of {names}")
    if kind in ("tars", "files", "transcripts"):
        where = files[0] if kind == "tars" else folder
        if media is not None:
            raise DataError(f"--media {media}: the media of {where} are files next to their texts. Leave it out")
        for name in columns.names.keys() & {*MEDIA, *SEGMENT}:
            raise DataError(f"--columns {name}={columns.names[name]}: the media of {where} are files. Leave it out")
    return Source(kind, files, media or folder, columns)


def _source_in(folder: Path) -> tuple[str, list[Path]]:
    """Return (kind, files or folders) of the source in a folder."""
    top = sorted(entry for entry in folder.iterdir() if entry.is_file() and entry.name[0] != ".")
    below = sorted(path for path in folder.rglob("*") if "/." not in f"/{path.relative_to(folder)}")
    if metadata := [path for path in top if path.name in _METADATA]:
        return "records", metadata
    if tars := [path for path in top if path.suffix == ".tar"]:
        return "tars", tars
    if {path.name for path in top}.issuperset(KALDI):
        return "kaldi", [folder]
    sources = _below(folder, top, below)
    for kind in ("transcripts", "records", "table", "files"):
        if kind in sources:
            return kind, sources[kind]
    names = sorted(entry.name for entry in folder.iterdir())
    refuse_compressed(*(folder / name for name in names))
    raise DataError(
        f"{folder} holds nothing to build shards of: sought are a JSON, JSONL, CSV or TSV file of records, parquet or "
        "Arrow files, tars, images, videos and audio next to files of the same name, or LibriSpeech's or Kaldi's "
        "transcripts; it has "
        f"{listed(names, 5) or 'nothing'}"
    )


def _below(folder: Path, top: Sequence[Path], below: Sequence[Path]) -> dict[str, list[Path]]:
    if tfrecords := [path for path in below if ".tfrecord" in path.name]:
        raise DataError(f"{tfrecords[0]}: TFRecord is not read: write WebDataset tars, files or parquet instead")
    sources: dict[str, list[Path]] = {}
    if transcripts := [path for path in below if path.name.endswith(TRANSCRIPTS)]:
        require_one_corpus(transcripts, folder)
        sources["transcripts"] = transcripts
    tables = [path for path in below if path.suffix in ARROW and path.is_file() and not path.name.startswith("cache-")]
    # img2dataset writes a parquet file without images next to each folder of files.
    if tables and not all((path.parent / path.stem).is_dir() for path in tables):
        sources["table"] = tables
    records = [
        path
        for path in top
        if path.suffix.lower() in (*JSON, *SEPARATORS)
        and path.name not in _NO_RECORDS
        and not path.name.endswith("_stats.json")
    ]
    media = [path for path in below if kind_of(path.suffix[1:].lower()) != "other" and path.is_file()]
    if records and not {path.with_suffix("") for path in records} & {path.with_suffix("") for path in media}:
        sources["records"] = records
    inner = [path for path in below if path.name in _METADATA]
    if media and inner and not sources:
        folders = listed([str(path.parent.relative_to(folder)) for path in inner])
        raise DataError(f"{folder}: {inner[0].name} is in {folders}. Give the folder that it is in as SOURCE")
    if media:
        sources["files"] = sorted({path.parent for path in media})
    return sources


def _of_split(folder: Path, files: Sequence[Path], wanted: str) -> list[Path]:
    """Return the files of a split: in a folder of its name, or named `SPLIT-...` as by Hugging Face."""
    splits = split_files(folder, files)
    names = [name for name in splits if wanted in (name, *name.split("/"))] if wanted else [*splits]
    if not wanted and len(splits) > 1:
        names = [name for name in splits if name.rpartition("/")[2] in TRAIN]
    if len(names) != 1:
        what = f"--split {wanted}: {folder} has" if wanted else f"{folder} has the splits"
        raise DataError(f"{what} {', '.join(sorted(splits))}: say which with --split")
    return splits[names[0]]
