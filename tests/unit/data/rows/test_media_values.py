"""Media of a build in the forms in which people have them: each is read, or rejected by the name of its column."""

import base64
import json

import numpy as np
import pytest

from data.build.build import Settings
from data.errors import DataError
from data.index.find_shards import find_shards
from data.media.audio import decode_audio
from data.storage.reader import ShardReader
from mimo_train.cli import main
from tests.tars import write_tar
from tests.unit.data.build.helpers import build, clip, found, image, media_folder, written
from tests.unit.data.build.test_build import hugging_face
from tests.unit.data.helpers import open_index

PNG = base64.b64encode(image(8)).decode()
FLAC = base64.b64encode(clip(800)).decode()
URI = f"data:image/png;base64,{PNG}"
WAVE = np.linspace(-1, 1, 800, dtype=np.float32)
ARRAY = {"array": WAVE.tolist(), "sampling_rate": 8000}


@pytest.fixture
def media(tmp_path):
    return media_folder(tmp_path)


def asked(*parts):
    answer = {"type": "text", "text": "A."}
    return [{"role": "user", "content": [*parts, answer]}, {"role": "assistant", "content": [answer]}]


@pytest.mark.parametrize(
    ("column", "values", "extents"),
    [
        ("image", ["a/one.PNG", "two.png"], [[6], [8]]),
        ("Image_Path", ["a/one.PNG", "two.png"], [[6], [8]]),
        ("images", [["two.png", "a/one.PNG"], ["three.png"]], [[8, 6], [10]]),
        ("image", [PNG, URI], [[8], [8]]),
        ("image", ["\n".join([PNG[:60], PNG[60:]]), URI], [[8], [8]]),
        ("image", [{"bytes": image(8), "path": None}, {"bytes": None, "path": "two.png"}], [[8], [8]]),
        ("audio", [ARRAY, ARRAY], [[8000], [8000]]),
        ("sound", [ARRAY, ARRAY], [[8000], [8000]]),
    ],
)
def test_a_column_of_a_table_is_read_in_every_form(column, values, extents, media, tmp_path):
    folder = hugging_face(tmp_path / "table", {column: values, "caption": ["A.", "B."]}, {})
    built = build(folder, tmp_path / "out", media=media)
    assert [sizes for sizes, _ in found(tmp_path / "out" / "train")] == extents
    kind = "image" if column.lower().startswith("image") else "audio"
    assert built.media == {"image": 0, "video": 0, "audio": 0} | {kind: sum(map(len, extents))}


def test_an_array_of_audio_stays_as_it_is(tmp_path):
    build(written(tmp_path, [{"audio": ARRAY, "text": "Hello."}]), tmp_path / "out")
    index = open_index(find_shards(tmp_path / "out" / "train")[0])
    (member,) = (member for member in index.members(0) if member.kind == "audio")
    raw = ShardReader().read(index.path, member.offset, member.size, member.extension)
    assert np.array_equal(decode_audio(raw, 8000).numpy(), WAVE)
    record = found(tmp_path / "out" / "train")[0][1]
    assert record == {"audio": "audio", "text": "Hello."}


@pytest.mark.parametrize(
    ("part", "extent"),
    [
        ({"type": "image", "image": "two.png"}, 8),
        ({"type": "image", "url": "two.png"}, 8),
        ({"type": "image", "base64": PNG}, 8),
        ({"type": "image_url", "image_url": {"url": URI, "detail": "high"}}, 8),
        ({"type": "image_url", "image_url": {"url": "file://FOLDER/two.png"}}, 8),
        ({"type": "audio", "audio": "one.flac"}, 8000),
        ({"type": "audio", "audio": ARRAY}, 8000),
        ({"type": "audio_url", "audio_url": {"url": "one.flac"}}, 8000),
        (
            {"type": "input_audio", "input_audio": {"data": base64.b64encode(clip(800)).decode(), "format": "flac"}},
            8000,
        ),
    ],
)
def test_media_of_typed_parts_are_taken(part, extent, media, tmp_path):
    part = json.loads(json.dumps(part).replace("FOLDER", str(media)))
    build(written(tmp_path, [{"messages": asked(part)}], lines=True), tmp_path / "out", media=media)
    ((extents, record),) = found(tmp_path / "out" / "train")
    assert extents == [extent]
    assert PNG not in json.dumps(record) and len(json.dumps(record)) < 400


def test_typed_parts_keep_the_order_of_media_and_may_repeat_a_column(media, tmp_path):
    parts = [{"type": "image", "image": name} for name in ("three.png", "a/one.PNG")]
    records = [
        {"messages": asked(*parts)},
        {"images": ["three.png", "a/one.PNG"], "messages": asked(*parts)},
        {"images": ["two.png", "a/one.PNG"], "messages": asked({"type": "image"}, {"type": "image"})},
    ]
    built = build(written(tmp_path, records), tmp_path / "out", media=media)
    assert [extents for extents, _ in found(tmp_path / "out" / "train")] == [[10, 6], [10, 6], [8, 6]]
    assert built.media["image"] == 6
    other = {"images": ["two.png"], "messages": asked(parts[0])}
    content = base64.b64encode((media / "three.png").read_bytes()).decode()  # named after the part, as the column
    same_name = {
        "image": f"data:image/png;base64,{PNG}",
        "messages": asked({"type": "image", "image": f"data:image/png;base64,{content}"}),
    }
    for at, record in enumerate((other, same_name)):
        with pytest.raises(DataError, match="record 0: media in the typed parts of messages and others in columns"):
            build(written(tmp_path, [record]), tmp_path / f"other{at}", media=media)


def test_typed_parts_of_a_table_are_taken(media, tmp_path):
    part = {"type": "image", "image": {"bytes": image(8), "path": None}, "text": None}
    text = {"type": "text", "image": None, "text": "What?"}
    turns = [{"role": "user", "content": [part, text]}, {"role": "assistant", "content": [text]}]
    build(hugging_face(tmp_path / "table", {"messages": [turns]}, {}), tmp_path / "out")
    assert [extents for extents, _ in found(tmp_path / "out" / "train")] == [[8]]


ADDRESS = "https://example.org/a.jpg"


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"url": ADDRESS, "caption": "A."}, "'url' is an address .*Download the files first"),
        ({"link": ADDRESS, "caption": "A."}, "'link' is an address"),
        ({"image_url": ADDRESS, "text": "A."}, "'image_url' is an address"),
        ({"messages": asked({"type": "image_url", "image_url": {"url": ADDRESS}})}, "'image_url' is an address"),
        ({"messages": asked({"type": "image", "image": "gone.png"})}, "no file .*gone.png"),
        ({"path": "two.png", "caption": "A."}, "'path' seems to hold an image .*--columns image=path"),
        ({"path": "two.png", "text": "A."}, "'path' seems to hold an image"),
        ({"path": "two.png", "messages": asked({"type": "text", "text": "Q"})}, "'path' seems to hold an image"),
        ({"photo": PNG, "text": "A."}, "'photo' seems to hold an image .*--columns image=photo"),
        ({"image": [[[0, 0, 0]]], "text": "A."}, "'image' is of type list. Expected the name of a file"),
        ({"pixels": [0, 1, 2], "text": "A."}, "'pixels' seems to hold media as numbers. Expected the name of a file"),
        ({"scan": [[[0, 0, 0]]], "caption": "A."}, "'scan' seems to hold media as numbers"),
        ({"audio": {"array": [[0.0, 1.0]], "sampling_rate": 8000}, "text": "A."}, r"of one channel .*\[1, 2\]"),
        ({"image": "data:image/png;base64,AAAA", "text": "A."}, "'image' is no image that can be decoded"),
    ],
)
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_medium_that_cannot_be_read_is_an_error_with_its_column(form, record, words, media, tmp_path):
    source = written(tmp_path, [record], lines=True)
    if form == "parquet":
        source = hugging_face(tmp_path / "table", {name: [value] for name, value in record.items()}, {})
    with pytest.raises(DataError, match=words):
        build(source, tmp_path / "out", media=media)


def test_an_array_in_a_field_without_a_known_name_is_named(tmp_path):
    with pytest.raises(DataError, match="'speech' holds audio .*--columns audio=speech"):
        build(written(tmp_path, [{"speech": ARRAY, "text": "A."}]), tmp_path / "out")


def test_a_table_of_addresses_is_an_error(tmp_path):
    (tmp_path / "x.csv").write_text(f"url,caption\n{ADDRESS},A.\n")
    with pytest.raises(DataError, match="line 2: 'url' is an address"):
        build(tmp_path / "x.csv", tmp_path / "out")
    tar = write_tar(tmp_path / "x.tar", [("0.json", json.dumps({"url": ADDRESS, "caption": "A."}).encode())])
    with pytest.raises(DataError, match="x.tar: 0: 'url' is an address"):
        build(tar, tmp_path / "out")
    with pytest.raises(DataError, match="--columns image=url: the media of .*x.tar are files"):
        build(tar, tmp_path / "out", columns={"image": "url"})
    with pytest.raises(DataError, match="--media .*: the media of .*x.tar are files"):
        build(tar, tmp_path / "out", media=tmp_path)
    folder = hugging_face(tmp_path / "table", {"blob": [None, image(8)], "caption": ["A.", "B."]}, {})
    with pytest.raises(DataError, match="'blob' holds files .png. that are not read. Give --columns image=blob"):
        build(folder, tmp_path / "out")


def test_texts_with_addresses_and_names_of_files_are_texts(tmp_path):
    records = [
        {"text": "A page.", "url": ADDRESS, "file_path": "src/logo.png", "boxes": [[0.0, 1.0]]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}], "source": "a.jpg"},
        {"caption": "A hill.", "id": "COCO_1"},
    ]
    built = build(written(tmp_path, records), tmp_path / "out")
    assert built.samples == {"train": 3} and not any(built.media.values())


def test_a_build_ends_with_the_number_of_media(media, tmp_path, capsys):
    records = [{"image": ["two.png", "three.png"], "audio": "one.flac", "caption": "A."}, {"text": "B."}]
    assert main(["shards", "build", str(written(media, records)), "--to", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{tmp_path / 'out'}: 2 images, 0 videos, 1 audio clip"


def test_most_records_are_not_skipped_silently(media, tmp_path, capsys):
    records = [{"image": "two.png" if at else "gone.png", "caption": "A."} for at in range(10)]
    file = written(media, [*records, {"image": "gone.png", "caption": "A."}])
    out = tmp_path / "out"
    with pytest.raises(DataError, match="2 of 11 records .*more than --max-bad 0.1 allows to skip"):
        build(file, out, Settings(skip_bad=True))
    assert not out.exists()
    assert build(file, out, Settings(skip_bad=True, max_bad=2)).left_out == 2
    assert build(written(media, records), tmp_path / "tenth", Settings(skip_bad=True)).left_out == 1
    assert main(["shards", "build", str(file), "--to", str(tmp_path / "other"), "--max-bad", "2"]) == 1
    assert "give --skip-bad too" in capsys.readouterr().err
