"""Parquet files made by hand."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from data.index.find_shards import find_shards
from data.storage.reader import ShardReader
from tests.unit.data.helpers import open_index


def write_table(path: Path, columns: Mapping[str, Any], rows: int = 4, **options: Any) -> Path:
    """A parquet file of these columns in row groups of `rows`; its folder is made if missing."""
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=rows, **options)
    return path


def images(contents: Iterable[bytes | None]) -> list[dict | None]:
    """A column as Hugging Face writes images."""
    return [None if raw is None else {"bytes": raw, "path": None} for raw in contents]


def table_of_shards(shards: Path, path: Path, rows: int = 7) -> Path:
    """The samples of tars as one parquet file, in their order: a list of images, and conversations or messages, all of
    typed parts."""
    reader, columns = ShardReader(), {"images": [], "conversations": [], "messages": []}
    for shard in find_shards(shards):
        index = open_index(shard)
        for row in range(len(index)):
            raws = {
                member.extension: reader.read(shard, member.offset, member.size, member.extension)
                for member in index.members(row)
            }
            record = json.loads(raws.pop("json"))
            for turn in record.get("messages", ()):
                if isinstance(turn["content"], str):
                    turn["content"] = [{"type": "text", "text": turn["content"]}]
            for name in ("conversations", "messages"):
                columns[name].append(record.get(name))
            columns["images"].append(images(raws.values()))
    return write_table(path, columns, rows)
