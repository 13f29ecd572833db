"""Held-out samples in the report."""

import base64
import json

import pytest

from tests.unit.logging.report.made_up_runs import PNG, report

JPEG = base64.b64encode(b"\xff\xd8\xff\xe0 not looked into").decode()


def test_samples_are_marked_in_words_and_their_text_is_escaped(tmp_path, vlm):
    samples = [
        {"images": [PNG, JPEG], "question": 'Is 1 < 2? "yes"', "answer": "<b>7</b>", "truth": "7", "correct": True},
        {"images": [PNG], "question": "Which?", "answer": "8", "truth": "9", "correct": False},
        {"images": ['x" onerror="alert(1)', "aGVsbG8="], "question": "q", "answer": "a", "truth": "t", "correct": None},
    ]
    (tmp_path / "samples.json").write_text(json.dumps(samples))
    page = report(tmp_path, vlm)
    images = page.all("img")
    assert [image["src"].split(";")[0] for image in images] == ["data:image/png", "data:image/jpeg", "data:image/png"]
    assert images[0]["alt"] == 'held-out image to the question: Is 1 < 2? "yes"'
    assert all("onerror" not in image for image in images) and not page.all("b")
    assert page.text.count("✓ right") == 1 and page.text.count("✗ wrong") == 1
    assert "1 of these 2 are right." in page.text
    assert [len(page.all("li", state)) for state in ("sample", "right", "wrong")] == [3, 1, 1]


def test_small_images_are_enlarged_without_blurring(tmp_path, vlm):
    wide = base64.b64decode(PNG)
    wide = base64.b64encode(wide[:16] + (129).to_bytes(4, "big") + wide[20:]).decode()
    (tmp_path / "samples.json").write_text(json.dumps([{"images": [PNG, wide, JPEG]}]))
    page = report(tmp_path, vlm)
    assert ["class" in image for image in page.all("img")] == [True, False, False]
    assert {image["alt"] for image in page.all("img")} == {"held-out image"}
    assert len(page.all("div", "many")) == 1


def test_clips_can_be_played_and_nothing_else_is_let_in(tmp_path, vlm):
    wav = base64.b64encode(b"RIFF\x24\x00\x00\x00WAVE").decode()
    words = {"question": "q", "answer": "a", "truth": "t", "correct": None}
    samples = [{"images": [PNG], "clips": [wav, wav], **words}, {"images": [], "clips": ['" onplay="x', PNG], **words}]
    (tmp_path / "samples.json").write_text(json.dumps(samples))
    clips = report(tmp_path, vlm).all("audio")
    assert [clip["src"] for clip in clips] == [f"data:audio/wav;base64,{wav}"] * 2
    assert not any("onplay" in clip for clip in clips)


@pytest.mark.parametrize("text", ['[{"quest', '{"question": "q"}', '["q"]'])
def test_unreadable_samples_are_told_and_cost_no_report(tmp_path, vlm, text):
    (tmp_path / "samples.json").write_text(text)
    page = report(tmp_path, vlm)
    assert "samples.json cannot be read: " in page.text and not page.all("ul", "samples")


def test_an_empty_list_of_samples_has_no_section(tmp_path, vlm):
    (tmp_path / "samples.json").write_text("[]")
    assert "Held-out samples" not in report(tmp_path, vlm).text
