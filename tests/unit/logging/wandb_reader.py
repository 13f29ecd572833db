"""Reads offline W&B runs: the records that the library itself parses, from files in its format."""

import json

from wandb.proto.wandb_internal_pb2 import Record

BLOCK = 32768


def records(path):
    """The records of a .wandb file: LevelDB's log format (blocks of 32 KiB, fragments with a header of 7 bytes)."""
    content, place, fragments = path.read_bytes(), 7, []
    assert content[:4] == b":W&B"
    while place + 7 <= len(content):
        if BLOCK - place % BLOCK < 7:
            place += BLOCK - place % BLOCK
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        fragments.append(content[place + 7 : place + 7 + length])
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last fragment of one
            record = Record()
            record.ParseFromString(b"".join(fragments))
            fragments = []
            yield record


def read_offline(run_dir):
    """(ids of the runs, rows without W&B's own keys) of the offline runs under `run_dir`, in order of time."""
    ids, rows = [], []
    for path in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        for record in records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                ids.append(record.run.run_id)
            elif kind == "history":
                items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
                rows.append({key: json.loads(value) for key, value in items.items() if not key.startswith("_")})
    return ids, rows
