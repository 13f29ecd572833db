"""Parquet files are read as they are: the samples of shards built from them, and every fault by its row."""

import json
import os
from datetime import date

import numpy as np
import pyarrow
import pytest
import soundfile

from data.build.build import Settings, build_shards
from data.build.find import find_source
from data.errors import DataError, ShardError
from data.index.find_shards import find_shards
from data.loader import StepLoader
from data.order.sources import Source
from data.order.step import Batching, Reader
from data.records.members import read_fields
from data.rows import row_reader
from data.rows.samples import Columns
from data.samples.media_spec import Media
from data.samples.shard_dataset import ShardDataset
from data.text.tokens import build_tokenizer
from mimo_train.cli import main
from tests.http_server import serving
from tests.tables import images, write_table
from tests.unit.data.build.helpers import PLAIN, TALK, TWO, clip, image
from tests.unit.data.helpers import images as image_module

CHAT = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "This."}]


def opened(shards, fields=None, **options):
    options = {"tokenizer": build_tokenizer("bytes", ["<image>"]), "sequence_length": 96, "shuffle": False} | options
    options = {"media": [image_module()], "max_bad_samples": 1000, "fields": read_fields(fields or {})} | options
    return ShardDataset(shards if isinstance(shards, list) else str(shards), **options)


def read(data, number):
    """(text, pixels of the images, why it is bad) of a sample."""
    sample, bad = data.read_text(number)
    media, bad_media = data.read_media(number, "images") if data.modules else ([], None)
    text = bytes(token for token in sample.input_ids[: sample.length].tolist() if token < 256).decode()
    return text, [item.tolist() for item in media], bad or bad_media


def everything(data):
    return [read(data, number) for number in range(len(data))]


def png(*sizes):
    return images(size and image(size) for size in sizes)


FORMS = {
    "captions": ({"image": png(8, 9, 10, 11, 12), "caption": list("abcde")}, {}),
    "lists": ({"images": [png(8, 9), png(10)], "conversations": [TWO, TALK]}, {}),
    "texts alone too": ({"image": png(8, None), "conversations": [TALK, PLAIN]}, {}),
    "media first": ({"image": png(8, 9), "messages": [CHAT, CHAT]}, {}),
    "pairs": ({"images": [png(8), png(9)], "texts": [[{"user": "Which?", "assistant": "This."}]] * 2}, {}),
    "bytes": ({"jpg": [image(8), image(9)], "txt": ["a", "b"], "text": ["c", "d"]}, {}),
    "several columns": ({"image_2": png(8, 9), "image_1": png(10, 11), "messages": [CHAT, CHAT]}, {}),
    "more columns": ({"image": png(8), "caption": ["x"], "at": [date(2024, 1, 2)], "score": [0.5]}, {}),
    "answers": ({"image": png(8, 9), "Q": ["Which?", None], "label": [3, 4]}, {"question": "Q", "answer": "label"}),
    "turns as text": ({"image": png(8), "talk": [json.dumps(TALK)]}, {"conversations": "talk"}),
    "a nested value": ({"image": png(8), "a": [{"b": ["no", "yes"]}]}, {}),
    "dictionaries": (
        {
            "image": pyarrow.array([image(8)] * 3, pyarrow.large_binary()),
            "caption": pyarrow.array(["x", "y", "x"], pyarrow.large_string()).dictionary_encode(),
        },
        {},
    ),
    "typed parts": (
        {
            "messages": [
                [
                    {"role": "user", "content": [{"type": "image", "image": image(8)}, {"type": "text", "text": "q"}]},
                    {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
                ]
            ]
        },
        {},
    ),
    "base64": ({"image": ["data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4"
                          "z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"], "caption": ["x"]}, {}),
    "names of files": ({"image": ["a/one.png"], "caption": ["x"]}, {}),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_the_samples_of_a_build(form, tmp_path):
    columns, names = FORMS[form]
    (tmp_path / "rows" / "a").mkdir(parents=True)
    (tmp_path / "rows" / "a" / "one.png").write_bytes(image(9))
    if form == "a nested value":
        rows = opened(write_table(tmp_path / "rows" / "x.parquet", columns), {"answer": "json[a][b][1]"})
        assert [text for text, *_ in everything(rows)] == ["yes"]
        return
    write_table(tmp_path / "rows" / "x.parquet", columns, rows=2)
    settings = Settings(seed=None)
    build_shards(find_source(tmp_path / "rows" / "x.parquet", Columns(names)), tmp_path / "tars", settings)
    rows = opened(tmp_path / "rows", {name: f"json[{column}]" for name, column in names.items()})
    tars = opened(tmp_path / "tars" / "train")
    assert everything(rows) == everything(tars)
    assert not any(bad for *_, bad in everything(rows)) and all(text for text, *_ in everything(rows))
    ours, theirs = rows.plan_step(0, len(rows)), tars.plan_step(0, len(rows))
    assert ours.tokens["images"].tolist() == theirs.tokens["images"].tolist()


def test_rows_of_several_modules_and_forms_of_audio(tmp_path):
    wave = {"array": [0.0, 0.5] * 200, "sampling_rate": 8000, "bytes": None}
    file = {"array": None, "sampling_rate": None, "bytes": clip(400, "WAV")}
    columns = {"image": png(8, None, 9), "audio": [file, wave, None], "messages": [CHAT] * 3}
    path = write_table(tmp_path / "x.parquet", columns, 2)
    build_shards(find_source(path, Columns()), tmp_path / "tars", Settings(seed=None))
    sound = Media("sound", "audio", "<audio>", lambda frames, rate: 2, lambda frames, rate: (400, 8000))
    options = {"media": [image_module(), sound], "tokenizer": build_tokenizer("bytes", ["<image>", "<audio>"])}
    rows, tars = opened(path, **options), opened(tmp_path / "tars" / "train", **options)
    assert [rows.token_counts(number) for number in range(3)] == [
        {"images": 4, "sound": 2}, {"images": 0, "sound": 2}, {"images": 4, "sound": 0}
    ]  # fmt: skip
    assert everything(rows) == everything(tars) and not any(bad for *_, bad in everything(rows))
    for number in range(3):
        ours, theirs = (data.read_media(number, "sound")[0] for data in (rows, tars))
        assert [wave.tolist() for wave in ours] == [wave.tolist() for wave in theirs]


def test_a_row_that_names_a_segment_has_this_part_of_its_recording(tmp_path):
    soundfile.write(tmp_path / "long.wav", np.linspace(-0.5, 0.5, 8000), 8000)
    columns = {"audio": ["long.wav", "gone.wav"], "start": [0.25, 0.0], "end": [0.5, 1.0], "text": ["a", "b"]}
    sound = Media("sound", "audio", "<audio>", lambda frames, rate: 2, lambda frames, rate: (frames, 8000))
    options = {"media": [sound], "tokenizer": build_tokenizer("bytes", ["<audio>"])}
    rows = opened(write_table(tmp_path / "x.parquet", columns), **options)
    ((wave,), bad) = rows.read_media(0, "sound")
    expected, _ = soundfile.read(tmp_path / "long.wav", dtype="float32", start=2000, stop=4000)
    assert bad is None and wave.tolist() == expected.tolist()


def test_fields_name_columns_of_media(tmp_path):
    columns = {"left": png(8, 9), "Right": [{"bytes": image(10), "path": "x.png"}] * 2, "caption": ["a", "b"]}
    path = write_table(tmp_path / "x.parquet", columns)
    both, right = opened(path), opened(path, {"image": "right"})
    assert [both.token_counts(0), right.token_counts(0)] == [{"images": 8}, {"images": 4}]
    assert read(right, 1)[1] == read(both, 1)[1][1:]
    assert right.index(0).unread() == {("0.left.png", "an image that data.fields does not name"): 2}


BAD = {
    "an address": ({"image_url": ["https://a/b.jpg"]}, r"'image_url' is an address \(https://a/b.jpg\)"),
    "no image": ({"image": png(None)}, "a caption without its medium"),
    "two columns": ({"image": ["a.png"], "images": ["b.png"]}, "has both image and images"),
    "no file": ({"image": ["a.png"]}, "no file .*a.png"),
    "no header": ({"image": images([b"\x89PNG\r\n\x1a\n"])}, r"member .image.png \(8 bytes\) has no readable image"),
    "no kind": ({"image": images([b"nothing"])}, "'image' is no image that can be decoded"),
    "an empty item": ({"images": [png(8, None)]}, "an empty image among those of 'images'"),
    "damaged": ({"image": images([image(30)[:-40]])}, "member .image.png: .*"),
    "numbers": ({"pixels": [[[[0.5]]]]}, "'pixels' seems to hold media as numbers"),
    "a null": ({"image": png(8), "caption": [None]}, "caption is null, not a text; data.null_captions=skip"),
    "not UTF-8": (
        {"image": png(8), "caption": pyarrow.array([b"\xff"]).view(pyarrow.string())}, "can't decode byte 0xff"
    ),
    "no date": ({"image": png(8), "at": pyarrow.array([2**62], pyarrow.timestamp("us"))}, "out of range"),
    "no record": ({"image": png(8), "caption": [1]}, "caption is a number, not a text"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_row_is_named_and_keeps_its_shape(fault, tmp_path):
    columns, words = BAD[fault]
    path = write_table(tmp_path / "x.parquet", {"caption": ["x"]} | columns)
    data = opened(path)
    _, media, bad = read(data, 0)
    assert len(media) * 4 == data.token_counts(0)["images"]
    assert str(bad).startswith(f"{path}, key 'row group 0, row 0': ")
    with pytest.raises(AssertionError if not bad else DataError, match=words):
        raise DataError(bad.reason)
    data.bad_samples.record(bad)


def test_damage_is_a_bad_sample_for_each_row_of_its_group(tmp_path):
    path = write_table(tmp_path / "x.parquet", {"image": png(*range(8, 20)), "caption": [*"abcdefghijkl"]}, 4,
                       write_page_checksum=True)  # fmt: skip
    raw = bytearray(path.read_bytes())
    at = raw.index(image(13)[-60:-40])
    raw[at] ^= 0xFF
    path.write_bytes(raw)
    data = opened(path)
    reasons = [bad and str(bad) for *_, bad in everything(data)]
    assert [bool(reason) for reason in reasons] == [False] * 4 + [True] * 4 + [False] * 4
    assert all("row group 1" in reason and "CRC checksum verification failed" in reason for reason in reasons[4:8])


@pytest.mark.parametrize("at", [2, -6])
def test_a_file_that_is_no_parquet_is_a_shard_error(at, tmp_path):
    path = write_table(tmp_path / "x.parquet", {"caption": ["x"]})
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0xFF
    path.write_bytes(raw if at < 0 else b"")
    with pytest.raises(ShardError, match=r"x.parquet: not a readable parquet file"):
        opened(path)


def test_a_repeated_column_is_a_shard_error(tmp_path):
    table = pyarrow.table([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["caption", "caption"])
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(ShardError, match="x.parquet: the column 'caption' is there twice"):
        opened(tmp_path)


def test_bytes_of_unknown_kind_are_named(tmp_path):
    with pytest.raises(ShardError, match=r"'data' holds files \(png\) that are not read. Rename it"):
        opened(write_table(tmp_path / "a" / "x.parquet", {"data": [image(8)], "caption": ["x"]}))
    data = opened(write_table(tmp_path / "b" / "x.parquet", {"image": png(8), "data": [b"x"], "caption": ["x"]}))
    assert data.unread_members() == {("data.bin", "an array or a file of weights"): 1}


def test_empty_files_and_row_groups_have_no_samples(tmp_path):
    columns = {"image": png(8), "caption": ["x"]}
    path = write_table(tmp_path / "b.parquet", columns)
    table = pyarrow.parquet.read_table(path)
    with pyarrow.parquet.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
        for part in (table.slice(0, 0), table, table.slice(0, 0), table):
            writer.write_table(part)
    write_table(tmp_path / "c.parquet", {"image": png(8)[:0], "caption": []})
    data = opened(tmp_path)
    assert data.catalogue.counts.tolist() == [2, 1, 0]
    assert [data.locate(number)[1] for number in range(3)] == [f"row group {group}, row 0" for group in (1, 3, 0)]
    assert not any(bad for *_, bad in everything(data))
    with pytest.raises(DataError, match="no sample in 1 shard"):
        opened(tmp_path / "c.parquet")


def test_a_rank_reads_only_its_columns_and_each_row_group_once(tmp_path, monkeypatch):
    columns = {"image": png(*range(20, 50)), "caption": ["x" * 50] * 30, "score": [*range(30)]}
    path = write_table(tmp_path / "x.parquet", columns, 10, use_dictionary=False, compression="none")
    opened(path)
    text, media, size = opened(path), opened(path), path.stat().st_size
    for number in range(30):
        text.read_text(number)
        media.read_media(number, "images")
    assert 30 * 50 < text.reader.bytes_read["parquet text"] < 30 * 50 + 3000
    assert "parquet media" not in text.reader.bytes_read
    assert sum(map(len, map(image, range(20, 50)))) < media.reader.bytes_read["parquet media"] < size
    assert "parquet text" not in media.reader.bytes_read
    monkeypatch.setattr(row_reader, "CACHE_BYTES", 1)
    media.close()
    before = media.reader.bytes_read["parquet media"]
    for number in (0, 10, 0, 1):  # row groups 0, 1, 0, and 0 from the cache
        media.read_media(number, "images")
    assert media.reader.bytes_read["parquet media"] == pytest.approx(2 * before, rel=0.2)
    assert len(media.reader._groups) == 1


def test_a_changed_file_is_noticed(tmp_path):
    path = write_table(tmp_path / "x.parquet", {"caption": ["one", "two"]}, 1)
    data = opened(path, media=[])
    assert read(data, 0)[0] == "one"
    write_table(tmp_path / "x.parquet", {"caption": ["six", "ten"]}, 1)
    os.utime(path, ns=(1, data.version(0).mtime_ns))
    with pytest.raises(ShardError, match="the shard changed after it was indexed"):
        read(data, 1)
    assert [text for text, *_ in everything(opened(path, media=[]))] == ["six", "ten"]


def test_steps_of_tars_and_tables_together_for_any_ranks_and_start(tmp_path):
    write_table(tmp_path / "rows" / "x.parquet", {"image": png(*range(8, 20)), "caption": [*"abcdefghijkl"]}, 5)
    build_shards(find_source(tmp_path / "rows", Columns()), tmp_path / "tars", Settings(per_shard=5))
    sources = [Source("rows", str(tmp_path / "rows")), Source("tars", str(tmp_path / "tars" / "train"))]

    def steps(ranks, first, count):
        """(numbers, tokens, pixels) of every sample of some steps."""
        samples = {}
        for rank in range(ranks):
            data = opened(sources, shuffle=True, seed=5)
            readers = [Reader("language", rank, ranks), Reader("images", rank, ranks)]
            batching = Batching(8, 4, replicas=ranks)
            with StepLoader(data, batching, readers, consumed_samples=8 * first, limit=count, workers=2) as loader:
                for step in loader:
                    for batch in step.microbatches:
                        pixels = batch["modality_inputs"]["images"]["images"]["pixels"]
                        for at, number in enumerate(batch["sample_numbers"].tolist()):
                            samples[number] = batch["input_ids"][at].tolist(), pixels[at].tolist()
        return samples

    whole = steps(1, 0, 4)
    assert sorted(whole) == [*range(32)]
    assert steps(2, 0, 4) == whole
    assert steps(4, 2, 2) == {number: whole[number] for number in range(16, 32)}


def test_a_remote_file_is_read_by_ranges(tmp_path):
    columns = {"image": png(*[60] * 40), "caption": ["x"] * 40}
    path = write_table(tmp_path / "x.parquet", columns, 10, use_dictionary=False, compression="none")
    with serving({"x.parquet": path.read_bytes()}) as server:
        data = opened(f"{server.url('right', 'x.parquet')}", cache_dir=tmp_path / "index")
        local = opened(path)
        assert read(data, 25)[:2] == read(local, 25)[:2]
        assert sum(data.reader.bytes_read.values()) < path.stat().st_size / 2
        data.close()


def test_folders_name_the_train_split(tmp_path):
    for name in ("data/train-00000-of-00002", "data/train-00001-of-00002", "data/test-00000-of-00001"):
        write_table(tmp_path / "hub" / f"{name}.parquet", {"caption": [name]})
    found = [path.stem for path in find_shards(tmp_path / "hub")]
    assert found == ["train-00000-of-00002", "train-00001-of-00002"]
    for name in ("a", "b"):
        write_table(tmp_path / "plain" / f"{name}.parquet", {"caption": [name]})
    assert [path.stem for path in find_shards(tmp_path / "plain")] == ["a", "b"]
    for name in ("en/train-0", "de/train-0"):
        write_table(tmp_path / "configs" / f"{name}.parquet", {"caption": [name]})
    with pytest.raises(DataError, match=r"has parquet files of de/train, en/train: name those to read, such as"):
        find_shards(tmp_path / "configs")
    assert len(find_shards(tmp_path / "configs" / "*" / "*.parquet")) == 2


def test_commands_on_parquet_files(tmp_path, capsys):
    path = write_table(tmp_path / "x.parquet", {"image": png(8, 9, None), "caption": ["a", "b", "c"]}, 2)
    assert (
        main(["shards", "index", str(tmp_path)]) == 0 and "1 of 1 shard indexed, 3 samples" in capsys.readouterr().out
    )
    assert main(["shards", "inspect", str(path), "--samples", "1"]) == 0
    assert "row group 0, row 0  .image.png 8x8, .json " in capsys.readouterr().out
    assert main(["shards", "verify", str(path)]) == 1
    out = capsys.readouterr().out
    assert (
        f"bad: {path}: key row group 1, row 0: a caption without its medium" in out
        and "3 samples checked, 1 bad" in out
    )
