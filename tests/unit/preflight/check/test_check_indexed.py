"""`check`, `shards` and config faults of .bin and .idx files."""

import os

import pytest

from mimo_train.cli import main
from mimo_train.config.errors import ConfigError
from mimo_train.layout.run import resolve
from mimo_train.preflight.check import check
from tests.indexed import END, texts, write_indexed
from tests.unit.configs import load
from tests.unit.preflight.check.shards import record, shard

OWN = ("data.demo=", "data.validation_shards=", "data.sequence_length=32")


def found(*overrides, config="gpt_tiny"):
    """Return (faults, warnings, rows of the data) of a check."""
    report = check(load(config, *OWN, *overrides))
    (rows,) = (table.rows for table in report.tables if table.title == "Data")
    return [str(fault) for fault in report.faults], report.warnings, [" ".join(row) for row in rows]


def test_sound_files(tmp_path):
    prefix = write_indexed(tmp_path / "a", texts(200))
    faults, warnings, rows = found(f"data.shards={prefix}", "data.split='90,10'", "train.eval_samples=1000")
    assert not faults
    (fewer,) = warnings
    assert fewer.startswith("data.split: train.eval_samples asks for 1,000 samples, and there are 1")
    said = "\n".join(rows)
    for one in ("1 of 1 pair of .bin and .idx", "documents 200, of", "(uint16)", "[end]", "samples not trained on"):
        assert one in said
    assert any(row.startswith("epochs") for row in rows)


@pytest.mark.parametrize(
    ("damage", "key", "said"),
    [
        (lambda at: os.unlink(f"{at}.idx"), "data.shards", "a.idx: there is no such file, only a.bin"),
        (lambda at: os.truncate(f"{at}.bin", 100), "data.shards", "a.bin: has 100 bytes"),
        (lambda at: write_indexed(at, [[1, 2, END]]), "data.shards", "data.sequence_length 32 needs 33"),
        (lambda at: write_indexed(at, [[5] * 500, [3000, END] * 250]), "data.tokenizer", "the id 3000"),
        (lambda at: shard(at.parent / "t.tar", ("1.json", record("Q"))), "data.shards", "reads one kind"),
    ],
)
def test_faults_of_files(tmp_path, damage, key, said):
    prefix = write_indexed(tmp_path / "d" / "a", texts(50))
    damage(prefix)
    faults, _, _ = found(f"data.shards={prefix.parent if said == 'reads one kind' else prefix}")
    assert any(fault.startswith(f"{key}: ") and said in fault for fault in faults), faults


def test_documents_without_an_end_are_told(tmp_path):
    documents = texts(30)
    prefix = write_indexed(tmp_path / "a", [one if at % 2 else one[:-1] + [65] for at, one in enumerate(documents)])
    faults, (warning,), _ = found(f"data.shards={prefix}")
    assert not faults and "15 of 30 documents do not end with [end] (id 258)" in warning and "--append-eod" in warning


def test_the_same_files_in_both_sets_are_told(tmp_path):
    prefix = write_indexed(tmp_path / "a", texts(50))
    _, warnings, _ = found(f"data.shards={prefix}", f"data.validation_shards={prefix}.bin")
    assert any("also in data.shards" in warning for warning in warnings)


def test_keys_that_do_not_go_together(tmp_path):
    prefix = write_indexed(tmp_path / "a", texts(50))
    tar = shard(tmp_path / "t.tar", ("1.json", record("Q")))
    for overrides, said in (
        ((f"data.shards={tar}", "data.split='9,1'"), "data.split: is of the documents of .bin and .idx files"),
        (
            (f"data.shards={tar}", "data.pack=true", "data.separate_documents=true"),
            "data.separate_documents: is for .bin",
        ),
        ((f"data.shards={prefix}", "data.fields={text: txt}"), "data.fields: is for records"),
        (
            ("data.shards=", f"data.mix=[{{shards: {prefix}}}, {{shards: {prefix}, name: b, fields: {{text: txt}}}}]"),
            "data.mix[1].fields: is for records, and data.mix[1].shards is of .bin and .idx files",
        ),
        (
            (f"data.shards={tar}", f"data.validation={{a-b: {{shards: {prefix}, fields: {{text: txt}}}}}}"),
            "data.validation.a-b.fields: is for records, and data.validation.a-b.shards is",
        ),
        ((f"data.shards={prefix}", "data.video.max_frames=4"), "data.video: is for records"),
        ((f"data.shards={prefix}", "data.null_captions=skip"), "data.null_captions: is for records"),
        (
            ("data.shards=", f"data.mix=[{{shards: {prefix}}}, {{shards: {tar}}}]"),
            "data.mix[1].shards: is not of .bin and .idx files, and data.mix[0].shards is",
        ),
    ):
        faults, _, _ = found(*overrides)
        assert any(fault.startswith(said) for fault in faults), (overrides, faults)
    faults, _, _ = found(f"data.shards={prefix}", config="vlm_digits")
    assert any("for a run without encoders, and modules has images" in fault for fault in faults)
    for overrides, said in (
        (("data.separate_documents=true",), "data.separate_documents: requires data.pack=true"),
        (("data.split='1,x'",), "data.split: '1,x' is not a split"),
        (("data.split='9,1'", "data.validation_fraction=0.1"), "data.split: is 9,1, and data.validation_fraction"),
        (("data.split='9,1'", "data.validation_shards=a"), "data.split: holds out training samples"),
    ):
        with pytest.raises(ConfigError) as error:
            resolve(load("gpt_tiny", *OWN, "data.shards=a", *overrides))
        assert said in str(error.value)


def test_a_held_out_set_of_shards_beside_them_has_fields_of_its_own(tmp_path):
    prefix = write_indexed(tmp_path / "a", texts(50))
    tar = shard(tmp_path / "t.tar", ("1.caption.txt", b"a cat"), ("1.other.txt", b"a dog"))
    faults, warnings, rows = found(
        f"data.shards={prefix}", f"data.validation={{more: {{shards: {tar}, fields: {{caption: caption.txt}}}}}}"
    )
    assert not faults and any("a cat" in row for row in rows), (faults, rows)
    assert all("dog" not in row for row in rows)


def test_commands(tmp_path, capsys):
    documents = texts(50)
    prefix = write_indexed(tmp_path / "a", documents)
    of_config = ["gpt_tiny", *OWN, f"data.shards={prefix}"]
    tokens = sum(map(len, documents))
    line = f"{prefix}.bin: 50 documents, {tokens:,} tokens (uint16)"
    for arguments, said in (
        (["index", str(prefix)], f"{prefix}: .bin and .idx files need no other index"),
        (["index", *of_config], "nothing need be counted"),
        (["inspect", str(prefix), "--samples", "1"], f"document 0, {len(documents[0])} tokens: {documents[0][0]} "),
        (["inspect", *of_config, "--html", str(tmp_path / "page.html")], "20 samples"),
        (["verify", str(prefix)], f"{line}, the largest {END}"),
        (["verify", *of_config, "--workers", "1"], f"data.shards: {(tokens - 1) // 32} samples, 0 bad"),
    ):
        assert main(["shards", *arguments]) == 0
        assert said in capsys.readouterr().out
    assert "document" in (tmp_path / "page.html").read_text()
    documents[40][0] = 5000
    write_indexed(prefix, documents)
    assert main(["shards", "verify", *of_config, "--workers", "1"]) == 1
    assert "the id 5000" in capsys.readouterr().out
    raw = bytearray((tmp_path / "a.idx").read_bytes())
    raw[38] ^= 1
    (tmp_path / "a.idx").write_bytes(raw)
    assert main(["shards", "verify", str(prefix)]) != 0
    assert main(["shards", "verify", *of_config, "--workers", "1"]) == 1
    assert "one behind the other" in "".join(capsys.readouterr())
