"""A page about samples: what is learned, what is an image, what is heard; and nothing of a caption is markup."""

import json

import numpy as np
import pytest
import soundfile

from mimo_train.cli import main
from mimo_train.logging.report.page import length_bins, token_runs
from tests.tars import write_tar
from tests.unit.data.helpers import encode_image
from tests.unit.logging.report.parsed_page import ParsedPage

EVIL = "</span></style><script src='http://example.org/x.js'>alert(1)</script>&amp;"


@pytest.fixture
def shards(tmp_path):
    sound = tmp_path / "a.wav"
    soundfile.write(sound, np.zeros(1600, dtype=np.int16), 16000)
    members = [
        ("a.png", encode_image(16, 16, "PNG")),
        ("a.json", json.dumps({"caption": f"A hill. {EVIL}"}).encode()),
        ("b.wav", sound.read_bytes()),
        ("b.json", json.dumps({"caption": "A tone."}).encode()),
        ("c.png", b"no image"),
        ("c.json", json.dumps({"caption": EVIL}).encode()),
    ]
    return write_tar(tmp_path / "s" / "a.tar", members)


def test_samples_are_shown_as_they_are_learned(shards, tmp_path, capsys):
    file = tmp_path / "page.html"
    given = [f"data.shards={shards}", "data.demo=", "data.validation_shards=", "data.shuffle=false"]
    assert main(["shards", "inspect", "mixed_tiny", *given, "data.sequence_length=256", "--html", str(file)]) == 0
    assert "3 samples, lengths of 3" in capsys.readouterr().out
    page = ParsedPage(file.read_text())
    assert not page.outside() and EVIL in page.words
    assert len(page.all("img")) == 1 and len(page.all("audio")) == 1 and len(page.all("li", "sample")) == 3
    assert len(page.all("span", "learned")) == 2 and len(page.all("span", "medium")) == 2
    assert "Bad: member .png (8 bytes) has no readable image header" in page.words and "bad: 1" in page.words
    assert "<image> x " in page.words and "<audio> x " in page.words
    assert sum(1 for _ in page.all("rect")) >= 1


def test_a_page_needs_a_config(shards, tmp_path, capsys):
    assert main(["shards", "inspect", str(shards), "--html", str(tmp_path / "x.html")]) == 1
    assert "is no config: give one" in capsys.readouterr().err and not (tmp_path / "x.html").exists()


def test_runs_and_bins():
    runs = token_runs([9, 7, 7, 8, 1, 2, 3], [0, 0, 0, 0, 1, 1, 0], {7, 8}, lambda ids: str(list(ids)))
    assert [(run.text, run.kind, run.tokens) for run in runs] == [
        ("[9]", "given", 1),
        ("[7]", "medium", 2),
        ("[8]", "medium", 1),
        ("[1, 2]", "learned", 2),
        ("[3]", "given", 1),
    ]
    words = {1: " The", 2: " answer", 3: " is"}
    runs = token_runs([1, 2, 3], [0, 1, 0], {7}, lambda ids: "".join(words[each] for each in ids).lstrip())
    assert [run.text for run in runs] == ["The", " answer", " is"]
    bins = length_bins([3, 3, 4, 100])
    assert sum(samples for _, _, samples in bins) == 4 and bins[0] == (3, 7, 3) and bins[-1][1] >= 100
    assert length_bins([5]) == [(5, 5, 1)] and not length_bins([])
