"""Shards from what people have: what goes in is what training reads, and nothing is lost silently."""

import json
import os
import socket
import tarfile
from datetime import date

import pytest
import webdataset

from data.build.build import Settings
from data.errors import DataError
from data.index.find_shards import find_shards
from data.rows.samples import Columns
from mimo_train.cli import main
from tests.tars import write_tar
from tests.unit.data.build.helpers import (
    PLAIN,
    RECORDS,
    TALK,
    TWO,
    build,
    clip,
    found,
    image,
    media_folder,
    written,
)


@pytest.fixture
def media(tmp_path):
    return media_folder(tmp_path)


@pytest.mark.parametrize("lines", [False, True])
def test_every_record_and_file_is_in_its_sample(lines, media, tmp_path):
    settings = Settings(seed=None, per_shard=3)
    built = build(written(tmp_path, RECORDS, lines), tmp_path / "out", settings, media)
    assert built.samples == {"train": 4} and not built.left_out and not built.notes
    assert [path.name for path in find_shards(tmp_path / "out" / "train")] == ["train-000000.tar", "train-000001.tar"]
    assert found(tmp_path / "out" / "train") == list(zip([[6], [10, 8], [], [8]], RECORDS, strict=True))
    shard = tmp_path / "out" / "train" / "train-000000.tar"
    (sample, *_) = webdataset.WebDataset(str(shard), shardshuffle=False)
    assert sample["png"] == (media / "a/one.PNG").read_bytes()  # as it was, byte by byte
    with tarfile.open(shard) as tar:
        assert [member.name for member in tar][:2] == ["000000.png", "000000.json"]


def test_held_out_records_are_in_no_training_shard(media, tmp_path):
    records = [{"conversations": PLAIN, "number": number} for number in range(10)]
    built = build(written(tmp_path, records), tmp_path / "out", Settings(held_out=2, seed=None))
    assert built.samples == {"train": 8, "held_out": 2}
    numbers = {part: [record["number"] for _, record in found(tmp_path / "out" / part)] for part in built.samples}
    assert numbers == {"train": [0, 1, 3, 4, 5, 6, 8, 9], "held_out": [2, 7]}


BAD = [
    ({"image": "gone.png", "conversations": TALK}, "no file "),
    ({"image": "a/one.PNG", "conversations": TWO}, "2 image placeholders, but the sample has 1"),
    ({"conversations": TALK}, "1 image placeholder, but the sample has 0"),
    ({"image": "a/one.jxl", "conversations": TALK}, "a/one.jxl is no image that can be decoded"),
    ({"image": "cut.jpg", "conversations": TALK}, "cut.jpg has no readable image header"),
    ({"image": 3, "conversations": TALK}, "'image' is of type int. Expected the name of a file"),
    ({"image": "two.png", "images": ["two.png"], "conversations": TALK}, "has both image and images"),
    ({"image": "two.png"}, "none of conversations, messages, caption, text"),
    ({"image": None, "caption": "x"}, "a caption without its medium"),
    ({"caption": "\ud83d"}, "half of a surrogate pair"),
    (["no", "record"], "is a JSON list, not an object"),
]


@pytest.mark.parametrize(("bad", "words"), BAD, ids=[words for _, words in BAD])
def test_a_record_that_cannot_be_used_is_named_before_anything_is_written(bad, words, media, tmp_path):
    (media / "cut.jpg").write_bytes(b"\xff\xd8 no image")
    file, out = written(tmp_path, [RECORDS[0], bad]), tmp_path / "out"
    with pytest.raises(DataError, match="1 of 2 records .* cannot be used; nothing was written.*\nrecord 1") as error:
        build(file, out, media=media)
    assert words in str(error.value) and not out.exists()
    built = build(file, out, Settings(skip_bad=True, max_bad=9), media)
    assert built.samples == {"train": 1} and built.left_out == 1
    assert words in json.loads((out / "left_out.jsonl").read_text())["reason"]
    assert found(out / "train") == [([6], RECORDS[0])]


def test_what_is_no_plain_file_is_a_fault_and_not_waited_for(media, tmp_path, monkeypatch):
    os.mkfifo(media / "fifo.jpg")
    (media / "folder.jpg").mkdir()
    monkeypatch.chdir(media)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.jpg")
        names = ["fifo.jpg", "folder.jpg", "socket.jpg", "zero\0.jpg", "a/one.PNG"]
        file = written(tmp_path, [{"image": name, "conversations": TALK} for name in names])
        build(file, tmp_path / "out", Settings(skip_bad=True, max_bad=9), media)
    said = [json.loads(line)["reason"] for line in (tmp_path / "out" / "left_out.jsonl").read_text().splitlines()]
    assert said == [
        *(f"record {at}: no file {media / name}" for at, name in enumerate(names[:3])),
        f"record 3: {media}/zero\\x00.jpg: embedded null byte",
    ]


@pytest.mark.parametrize("skip_bad", [False, True])
def test_where_no_record_has_a_known_name_columns_are_the_remedy_once(skip_bad, media, tmp_path):
    records = [{"image": "two.png", "prose": "A cat."}, {"image": "two.png", "prose": "A dog."}]
    with pytest.raises(DataError, match="none of conversations") as error:
        build(written(tmp_path, records), tmp_path / "out", Settings(skip_bad=skip_bad, max_bad=9), media)
    assert str(error.value).count("--columns, such as caption=COLUMN") == 1
    with pytest.raises(DataError, match="1 of 3 records") as error:
        build(written(tmp_path, [*RECORDS[:2], records[0]]), tmp_path / "out", media=media)
    assert "--columns" not in str(error.value)


def test_files_that_cannot_be_read_are_named(media, tmp_path):
    out = tmp_path / "out"
    (tmp_path / "records.json").write_text('{"conversations": ')
    with pytest.raises(DataError, match="neither a JSON list nor a JSON object a line"):
        build(tmp_path / "records.json", out)
    file = written(tmp_path, RECORDS)
    with pytest.raises(DataError, match="no folder .*nowhere"):
        build(file, out, media=tmp_path / "nowhere")
    with pytest.raises(DataError, match="hold out fewer"):
        build(file, out / "1", Settings(held_out=4), media)
    build(file, out / "2", media=media)
    with pytest.raises(DataError, match="is not empty"):
        build(file, out / "2", media=media)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty holds nothing .* it has nothing"):
        build(tmp_path / "empty", out / "3")


TSV = "clip\tsaid\tage\none.flac\tHello there.\t31\none.flac\t\t40\nones.flac\tHi.\t3\none.flac\tHi.\n"


def test_a_table_of_clips_with_transcripts(media, tmp_path, capsys):
    file = media / "clips.tsv"
    file.write_text(TSV)
    columns = ["--columns", "audio=clip", "caption=said", "--question", "Transcribe."]
    given = ["shards", "build", str(file), "--to", str(tmp_path / "out"), *columns, "--no-shuffle"]
    assert main(given) == 1
    assert "line 4: no file" in capsys.readouterr().err
    assert main([*given, "--skip-bad", "--max-bad", "0.9"]) == 0
    told = capsys.readouterr().err
    assert "1 without a caption or answer to learn are left out, such as line 3" in told
    assert "2 records that cannot be used, see" in told and "\r" not in told
    turns = [{"from": "human", "value": "<audio>\nTranscribe."}, {"from": "gpt", "value": "Hello there."}]
    record = {"conversations": turns, "clip": "one.flac", "said": "Hello there.", "age": "31"}
    assert found(tmp_path / "out" / "train") == [([8000], record)]
    with pytest.raises(DataError, match=r"caption=text: .*clips.tsv has the columns clip, said, age"):
        build(file, tmp_path / "other", columns={"caption": "text"})
    with pytest.raises(DataError, match="captions=...: is no part of a record"):
        Columns({"captions": "said"})


def hugging_face(folder, table, features, name="data/train-00000-of-00001.parquet"):
    import pyarrow
    import pyarrow.parquet

    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pyarrow.table(table).replace_schema_metadata(metadata)
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(table, folder / name, row_group_size=2)
    else:
        with pyarrow.ipc.new_stream(str(folder / name), table.schema) as file:
            file.write_table(table)
    return folder


FEATURES = {
    "image": {"_type": "Image"},
    "sound": {"_type": "Audio", "sampling_rate": 8000},
    "kind": {"_type": "ClassLabel", "names": ["cat", "dog"]},
    "others": {"_type": "List", "feature": {"_type": "ClassLabel", "names": ["cat", "dog"]}},
}


@pytest.mark.parametrize("name", ["data/train-00000-of-00002.parquet", "train/data-00000-of-00001.arrow"])
def test_a_hugging_face_dataset_with_images_and_clips(name, media, tmp_path):
    table = {
        "image": [{"bytes": image(5), "path": None}, {"bytes": None, "path": "a/one.PNG"}, None],
        "sound": [None, None, {"bytes": clip(400, "WAV"), "path": "x.wav"}],
        "kind": [1, 0, 1],
        "others": [[1, 0], [], None],
        "at": [date(2024, 1, 2), None, None],
        "more": [b"1", b"2", b"3"],
    }
    folder = hugging_face(tmp_path / "hf", table, FEATURES, name)
    hugging_face(folder, {"kind": [0]}, {}, name.replace("train", "test"))
    columns = {"answer": "kind"}
    built = build(folder, tmp_path / "out", media=media, columns=columns, question="What is it?")
    assert built.samples == {"train": 3}
    assert built.notes == [
        "the column 'more' is left out: bytes of no kind that is known; --columns image=NAME (video, audio) says what"
    ]
    samples = found(tmp_path / "out" / "train")
    assert [extents for extents, _ in samples] == [[5], [6], [8000]]
    asked = [(record["conversations"][0]["value"], record["conversations"][1]["value"]) for _, record in samples]
    assert asked == [("<image>\nWhat is it?", "dog"), ("<image>\nWhat is it?", "cat"), ("<audio>\nWhat is it?", "dog")]
    assert [record.get("others") for _, record in samples] == [["dog", "cat"], [], None]
    assert samples[0][1]["at"] == "2024-01-02" and samples[1][1]["image"] == "a/one.PNG"
    with pytest.raises(DataError, match="--split none: .* has test, train"):
        build(folder, tmp_path / "other", split="none")


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv", "metadata.parquet"])
def test_a_folder_with_metadata_of_its_files(name, media, tmp_path):
    """As `imagefolder` of Hugging Face has it."""
    rows = {"a/one.PNG": "One.", "three.png": "Three."}
    lines = [json.dumps({"file_name": file, "text": text}) for file, text in rows.items()]
    table = ["file_name,text", *(",".join(row) for row in rows.items())]
    if name.endswith("parquet"):
        hugging_face(media, {"file_name": [*rows], "text": [*rows.values()]}, {}, name)
    else:
        (media / name).write_text("\n".join(lines if name.endswith("jsonl") else table))
    build(media, tmp_path / "out")
    samples = found(tmp_path / "out" / "train")
    assert [extents for extents, _ in samples] == [[6], [10]]
    assert all(text in str(record) for (_, record), text in zip(samples, rows.values(), strict=True))


def test_folders_with_metadata_of_their_own_are_named(media, tmp_path):
    (media / "a" / "metadata.jsonl").write_text('{"file_name": "one.PNG", "text": "One."}')
    with pytest.raises(DataError, match="metadata.jsonl is in a. Give the folder"):
        build(media, tmp_path / "out")
    build(media, tmp_path / "out", split="a")
    assert [extents for extents, _ in found(tmp_path / "out" / "train")] == [[6]]


def test_pairs_of_user_and_assistant_and_lists_of_images(tmp_path):
    pair = {"user": "Which is larger?", "assistant": "Both.", "source": "x"}
    table = {"images": [[{"bytes": image(4), "path": None}, {"bytes": image(4), "path": None}]], "texts": [[pair]]}
    folder = hugging_face(tmp_path / "hf", table, {"images": [{"_type": "Image"}]})
    built = build(folder, tmp_path / "out")
    ((extents, record),) = found(tmp_path / "out" / "train")
    assert extents == [4, 4] and record["conversations"][0]["value"] == "<image>\n<image>\nWhich is larger?"
    assert len(built.notes) == 2 and all(note.startswith("1 record with") for note in built.notes)


def downloaded(tmp_path, caption="A hill."):
    """Samples as img2dataset has them: the key, an image, its caption and its record."""
    for number, said in enumerate((caption, None, "A lake.")):
        key = f"{number:09d}"
        record = {"caption": said, "url": "u", "key": key, "status": "success", "error_message": None}
        yield key, image(4 + number), said or "", json.dumps(record)


def test_tars_of_img2dataset(tmp_path):
    folder = tmp_path / "tars"
    for shard in ("00000", "00001"):
        members = [
            (f"{key}.{extension}", raw)
            for key, image, said, record in downloaded(tmp_path)
            for extension, raw in (("jpg", image), ("txt", said.encode()), ("json", record.encode()))
        ]
        write_tar(folder / f"{shard}.tar", members)
        (folder / f"{shard}_stats.json").write_text("{}")
    cut = (folder / "00001.tar").read_bytes()
    (folder / "00002.tar").write_bytes(cut[:3000])
    built = build(folder, tmp_path / "out", Settings(seed=None, skip_bad=True, max_bad=9))
    reasons = (tmp_path / "out" / "left_out.jsonl").read_text()
    assert built.samples == {"train": 4} and built.left_out == 1 and "00002.tar: truncated" in reasons
    assert [note[:19] for note in built.notes] == ["2 without a caption"]
    samples = found(tmp_path / "out" / "train")
    assert [extents for extents, _ in samples] == [[4], [6]] * 2
    assert samples[0][1]["caption"] == "A hill." and samples[0][1]["key"] == "000000000"


@pytest.mark.parametrize("form", ["files", "parquet"])
def test_other_output_of_img2dataset(form, tmp_path):
    folder = tmp_path / form
    if form == "files":
        for key, image, said, record in downloaded(tmp_path):
            for extension, raw in (("jpg", image), ("txt", said.encode()), ("json", record.encode())):
                (folder / "00000").mkdir(parents=True, exist_ok=True)
                (folder / "00000" / f"{key}.{extension}").write_bytes(raw)
        hugging_face(folder, {"caption": ["A hill."]}, {}, "00000.parquet")
    else:
        rows = [json.loads(record) | {"jpg": image} for _, image, _, record in downloaded(tmp_path)]
        rows.append(rows[0] | {"jpg": None, "status": "failed_to_download", "error_message": "404"})
        hugging_face(folder, {name: [row[name] for row in rows] for name in rows[0]}, {}, "00000.parquet")
    built = build(folder, tmp_path / "out")
    assert built.samples == {"train": 2} and not built.left_out
    lost = "1 whose media could not be downloaded are left out, such as 00000.parquet: row 3: 404"
    assert (lost in built.notes) == (form == "parquet")
    samples = found(tmp_path / "out" / "train")
    assert [(extents, record["caption"]) for extents, record in samples] == [([4], "A hill."), ([6], "A lake.")]
