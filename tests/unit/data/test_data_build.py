"""Shards from a JSON file and a folder of media: what goes in is what training reads, and nothing is lost silently."""

import json

import pytest

from data.build import build_shards
from data.errors import DataError
from data.index import open_index
from data.shards import find_shards
from data.storage.local import ShardReader
from data.verify import check_sample
from tests.unit.data.helpers import encode_picture

TALK = [{"from": "human", "value": "<image>\nWhat is this?"}, {"from": "gpt", "value": "Ein Hügel."}]
TWO = [{"from": "human", "value": "<image><image>Which is larger?"}, {"from": "gpt", "value": "The second."}]
PLAIN = [{"from": "human", "value": "Hello."}, {"from": "gpt", "value": "Good day."}]


@pytest.fixture
def media(tmp_path):
    folder = tmp_path / "media"
    (folder / "a").mkdir(parents=True)
    for name, size in (("a/one.PNG", 6), ("two.png", 8), ("three.png", 10)):
        (folder / name).write_bytes(encode_picture(size, size, "PNG"))
    return folder


def written(tmp_path, records, lines=False):
    file = tmp_path / "records.json"
    file.write_text("\n".join(map(json.dumps, records)) if lines else json.dumps(records))
    return file


def found(folder):
    """(sizes of pictures, record) of each sample."""
    reader = ShardReader()
    samples = []
    for path in find_shards(folder):
        index = open_index(path)
        for row in range(len(index)):
            assert check_sample(reader, index, row) is None
            sizes = [member.height for member in index.members(row) if member.kind == "image"]
            record = index.members(row)[index.record(row)]
            raw = reader.read(index.path, record.offset, record.size, record.extension)
            samples.append((sizes, json.loads(raw)))
    return samples


RECORDS = [
    {"id": "x", "image": "a/one.PNG", "conversations": TALK},
    {"image": ["three.png", "two.png"], "conversations": TWO},
    {"conversations": PLAIN},
    {"image": "two.png", "caption": "Two."},
]


@pytest.mark.parametrize("lines", [False, True])
def test_every_record_and_file_is_in_its_sample(lines, media, tmp_path):
    built = build_shards(written(tmp_path, RECORDS, lines), media, tmp_path / "out", per_shard=3)
    assert built.samples == {"train": 4} and not built.left_out
    assert [path.name for path in find_shards(tmp_path / "out" / "train")] == ["train-000000.tar", "train-000001.tar"]
    assert found(tmp_path / "out" / "train") == list(zip([[6], [10, 8], [], [8]], RECORDS, strict=True))


def test_held_out_records_are_in_no_training_shard(media, tmp_path):
    records = [{"conversations": PLAIN, "number": number} for number in range(10)]
    built = build_shards(written(tmp_path, records), media, tmp_path / "out", held_out=2)
    assert built.samples == {"train": 8, "held_out": 2}
    numbers = {part: [record["number"] for _, record in found(tmp_path / "out" / part)] for part in built.samples}
    assert numbers == {"train": [0, 1, 3, 4, 5, 6, 8, 9], "held_out": [2, 7]}


BAD = [
    ({"image": "gone.png", "conversations": TALK}, "no file "),
    ({"image": "a/one.PNG", "conversations": TWO}, "2 image placeholder(s), but the sample has 1"),
    ({"conversations": TALK}, "1 image placeholder(s), but the sample has 0"),
    ({"image": "a/one.heic", "conversations": TALK}, "a/one.heic is no image that can be decoded"),
    ({"image": 3, "conversations": TALK}, "image is neither the name of a file nor a list"),
    ({"image": "two.png", "images": ["two.png"], "conversations": TALK}, "has both image and images"),
    ({"image": "two.png"}, "none of conversations, messages, caption, text"),
    (["no", "record"], "is a JSON list, not an object"),
]


@pytest.mark.parametrize(("bad", "words"), BAD, ids=[words for _, words in BAD])
def test_a_record_that_cannot_be_used_is_named_before_anything_is_written(bad, words, media, tmp_path):
    file = written(tmp_path, [RECORDS[0], bad])
    with pytest.raises(DataError, match="1 of 2 records .* cannot be used; nothing was written.*\nrecord 1") as error:
        build_shards(file, media, tmp_path / "out")
    assert words in str(error.value) and not (tmp_path / "out").exists()
    built = build_shards(file, media, tmp_path / "out", skip_bad=True)
    assert built.samples == {"train": 1} and len(built.left_out) == 1 and words in built.left_out[0]
    assert found(tmp_path / "out" / "train") == [([6], RECORDS[0])]


def test_shards_that_are_there_stay(media, tmp_path):
    file = written(tmp_path, RECORDS)
    build_shards(file, media, tmp_path / "out")
    with pytest.raises(DataError, match="holds shards already"):
        build_shards(file, media, tmp_path / "out")


def test_files_that_cannot_be_read_are_named(media, tmp_path):
    (tmp_path / "records.json").write_text('{"conversations": ')
    with pytest.raises(DataError, match="neither a JSON list nor a JSON object a line"):
        build_shards(tmp_path / "records.json", media, tmp_path / "out")
    with pytest.raises(DataError, match="no folder .*nowhere"):
        build_shards(written(tmp_path, RECORDS), tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(DataError, match="hold out fewer"):
        build_shards(written(tmp_path, RECORDS), media, tmp_path / "out", held_out=4)
