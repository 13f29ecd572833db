"""Records of checkpoints, as a save leaves them."""

import json
from pathlib import Path
from typing import Any

from mimo_train.checkpoint import folders
from mimo_train.checkpoint.format.files import COMPLETE, INDEX, write_marker


def write_record(folder: Path, record: Any) -> None:
    """Write the record of a checkpoint, or another one, and mark the folder as complete.

    Args:
        record: a value for JSON, or the text itself.
    """
    text = (record if isinstance(record, str) else json.dumps(record)).encode()
    (folder / folders.RECORD).write_bytes(text)
    (folder / COMPLETE).unlink(missing_ok=True)
    index = {INDEX: (folder / INDEX).read_bytes()} if (folder / INDEX).is_file() else {}
    write_marker(folder, {folders.RECORD: text, **index})
