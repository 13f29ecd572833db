"""Sources of shards for tests of `shards build`, and what is found in the shards."""

import io
import json
from pathlib import Path

import numpy as np
import soundfile

from data.build.build import Settings, build_shards
from data.build.find import find_source
from data.index.find_shards import find_shards
from data.rows.samples import Columns
from data.samples.verify import check_sample
from data.storage.reader import ShardReader
from tests.unit.data.helpers import encode_image, open_index

TALK = [{"from": "human", "value": "<image>\nWhat is this?"}, {"from": "gpt", "value": "Ein Hügel."}]
TWO = [{"from": "human", "value": "<image><image>Which is larger?"}, {"from": "gpt", "value": "The second."}]
PLAIN = [{"from": "human", "value": "Hello."}, {"from": "gpt", "value": "Good day."}]
ORDERED = Settings(seed=None)
ROOT = Path(__file__).parents[4]


def image(size):
    return encode_image(size, size, "PNG")


def clip(frames, kind="FLAC"):
    file = io.BytesIO()
    soundfile.write(file, np.zeros(frames, dtype=np.int16), 8000, format=kind)
    return file.getvalue()


def media_folder(tmp_path):
    folder = tmp_path / "media"
    (folder / "a").mkdir(parents=True)
    for name, size in (("a/one.PNG", 6), ("two.png", 8), ("three.png", 10)):
        (folder / name).write_bytes(image(size))
    (folder / "one.flac").write_bytes(clip(800))
    return folder


def written(tmp_path, records, lines=False):
    file = tmp_path / "records.json"
    file.write_text("\n".join(map(json.dumps, records)) if lines else json.dumps(records))
    return file


def build(path, to, settings=ORDERED, media=None, columns=None, question="", split="", workers=1, quoted=False):
    entries = [f"{what}={column}" for what, column in (columns or {}).items()]
    source = find_source(path, Columns.parse(entries, question, quoted), media, split)
    return build_shards(source, to, settings, workers=workers)


def found(folder):
    """(extents of media, record) of each sample; every one can be trained on."""
    reader = ShardReader()
    samples = []
    for path in find_shards(folder):
        index = open_index(path)
        for row in range(len(index)):
            assert check_sample(reader, index, row) is None
            extents = [max(member.extent) for member in index.members(row) if member.kind != "other"]
            record = index.members(row)[index.record(row)]
            raw = reader.read(index.path, record.offset, record.size, record.extension)
            samples.append((extents, json.loads(raw) if record.extension.endswith("json") else raw.decode()))
    return samples


RECORDS = [
    {"id": "x", "image": "a/one.PNG", "conversations": TALK},
    {"image": ["three.png", "two.png"], "conversations": TWO},
    {"conversations": PLAIN},
    {"image": "two.png", "caption": "Two."},
]
