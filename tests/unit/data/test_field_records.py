"""Records and files as tools in the field write them: failed downloads, hidden files, final newlines, quotes."""

import json

import pytest

from data.errors import DataError, NotDownloaded
from data.index.find_shards import find_shards
from data.records.members import read_fields
from data.records.records import parse_fields, parse_record
from tests.tars import write_tar
from tests.unit.data.build.helpers import ORDERED, build, found, image
from tests.unit.data.helpers import open_index


def test_hidden_files_are_skipped_at_any_depth(tmp_path):
    names = ("._0.png", "0.png", "a/._0.png", "a/0.png", "a/b/.DS_Store", "a/b/._1.png", "a/b/1.png")
    members = []
    for name in names:
        members.append((name, b"\0\5\x16\7" if "/." in f"/{name}" else image(8)))
        if name.endswith(("/0.png", "/1.png")) or name == "0.png":
            members.append((name.replace("png", "txt"), b"A hill."))
    shard = write_tar(tmp_path / "train" / "x.tar", members)
    (tmp_path / "train" / "._x.tar").write_bytes(b"\0\5\x16\7")
    index = open_index(shard)
    assert [index.key(row) for row in range(len(index))] == ["0", "a/0", "a/b/1"] and not index.num_bad
    assert [*find_shards(tmp_path / "train")] == [shard]
    assert build(tmp_path / "train", tmp_path / "tars").samples == {"train": 3}
    folder = tmp_path / "folder"
    for name, raw in members:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(raw)
    (folder / ".cache").mkdir()
    (folder / ".cache" / "0.png").write_bytes(image(8))
    (folder / "._records.jsonl").write_bytes(b"\0\5\x16\7")
    assert build(folder, tmp_path / "files").samples == {"train": 3}


FAILED = {"caption": "A hill.", "url": "u", "status": "failed_to_download", "error_message": "404"}


def test_a_record_whose_download_failed_is_left_out_and_counted(tmp_path):
    raw = json.dumps(FAILED).encode()
    with pytest.raises(NotDownloaded, match="failed_to_download and the sample has no media"):
        parse_record(raw, "json", "7", {"image": 0})
    with pytest.raises(NotDownloaded):
        parse_fields({"json": raw}, read_fields({"caption": "json[caption]"}), "7", {"image": 0})
    assert parse_record(raw, "json", "7", {"image": 1}).count("image") == 1
    good = json.dumps(FAILED | {"status": "success"}).encode()
    tar = write_tar(tmp_path / "tars" / "0.tar", [("0.png", image(8)), ("0.json", good), ("1.json", raw)])
    tar.with_name("0_stats.json").write_text(json.dumps({"count": 2, "successes": 1}))
    for name, question in (("plain", ""), ("asked", "What is this?")):
        built = build(tar.parent, tmp_path / name, question=question)
        assert built.samples == {"train": 1} and not built.left_out
        assert built.notes[0].startswith("1 whose media could not be downloaded are left out, such as 0.tar: 1")


@pytest.mark.parametrize(("raw", "text"), [(b"A hill.\n", "A hill."), (b"A\n\nhill.\r\n", "A\n\nhill."), (b"A", "A")])
def test_the_newline_at_the_end_of_a_text_file_is_not_trained(raw, text, tmp_path):
    assert parse_record(raw, "txt", "7", {"image": 1}).turns[-1].text == text
    assert parse_record(raw, "txt", "7", {}).turns[-1].text == text
    fields = read_fields({"caption": "caption.txt"})
    assert parse_fields({"caption.txt": raw}, fields, "7", {"image": 1}).turns[-1].text == text
    assert parse_record(json.dumps({"caption": "A\n"}).encode(), "json", "7", {}).turns[-1].text == "A\n"
    tar = write_tar(tmp_path / "0.tar", [("0.png", image(8)), ("0.txt", raw)])
    build(tar, tmp_path / "out", question="What?")
    ((_, record),) = found(tmp_path / "out" / "train")
    assert record["conversations"][1]["value"] == text


COMMON_VOICE = 'id\tsentence\n0\t"Quoted."\n1\t"Open\n2\tHe said "no".\n3\t"\n4\tclosed"\n5\t"One ""two""."\n'
SENTENCES = ['"Quoted."', '"Open', 'He said "no".', '"', 'closed"', '"One ""two""."']


def test_quotes_of_a_tsv_are_text(tmp_path):
    file = tmp_path / "validated.tsv"
    file.write_text(COMMON_VOICE)
    built = build(file, tmp_path / "out", columns={"caption": "sentence"})
    assert [record["caption"] for _, record in found(tmp_path / "out" / "train")] == SENTENCES
    assert len(built.notes) == 1 and built.notes[0].startswith("1 record with quotes around a cell")


def test_quotes_enclose_cells_of_a_tsv_where_that_is_requested(tmp_path):
    file = tmp_path / "validated.tsv"
    file.write_text('caption\tn\n"One\tand\ttwo\nthree"\t1\n"a ""b"" c"\t2\n')
    with pytest.raises(DataError, match=r"\nline 2: 3 columns, and 2 in line 1. If .* give --quoted"):
        build(file, tmp_path / "out")
    build(file, tmp_path / "out", quoted=True)
    assert [record["caption"] for _, record in found(tmp_path / "out" / "train")] == ["One\tand\ttwo\nthree", 'a "b" c']
    with pytest.raises(DataError, match="--quoted applies to a TSV file, and .*x.csv is not one"):
        (tmp_path / "x.csv").write_text("caption\nA\n")
        build(tmp_path / "x.csv", tmp_path / "other", quoted=True)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("x.csv", 'caption,n\nA,1\n"B\nC",2\nD\n', r"\nline 5: 1 column, and 2 in line 1"),
        ("x.csv", 'caption,n\nA,1\n"B,2\nC,3\n', r"the row that begins in line 3 cannot be read"),
        ("x.jsonl", '{"caption": "A"}\n\n{"caption": \n', r"\(line 3: Expecting value"),
        ("x.jsonl", '{"caption": "A"}\n\n{"caption": 3}\n', r"\nline 3: caption is a number, not a text"),
    ],
)
def test_an_error_names_the_line_of_the_file(name, text, words, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=words):
        build(tmp_path / name, tmp_path / "out", ORDERED)
