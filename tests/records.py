"""Records of checkpoints, as a save leaves them, and damage to files."""

import json
from pathlib import Path
from typing import Any

from mimo_train.checkpoint import folders
from mimo_train.checkpoint.format.files import COMPLETE, INDEX, write_marker
from mimo_train.checkpoint.format.index import Index


def write_record(folder: Path, record: Any) -> None:
    """Write the record of a checkpoint, or another one, and mark the folder as complete; without tensors, if it has no
    index.

    Args:
        record: a value for JSON, or the text itself.
    """
    text = (record if isinstance(record, str) else json.dumps(record)).encode()
    (folder / folders.RECORD).write_bytes(text)
    (folder / COMPLETE).unlink(missing_ok=True)
    if not (folder / INDEX).is_file():
        (folder / INDEX).write_bytes(Index().dump())
    write_marker(folder, {folders.RECORD: text, INDEX: (folder / INDEX).read_bytes()})


def flip(path: Path) -> None:
    """Change a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
