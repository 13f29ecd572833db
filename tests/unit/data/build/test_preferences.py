"""Shards of preferences: every form keeps its fields, and media stand before the question of both answers."""

import json

import pytest

from data.errors import DataError
from data.records.preferences import parse_any
from tests.unit.data.build.helpers import build, found, image, media_folder, written
from tests.unit.data.build.test_build import hugging_face
from tests.unit.data.records.test_preferences import GOOD, PAIR, TYPED, USER, rendered

WITH_IMAGE = (["user: <image>q", "*assistant: good"], ["user: <image>q", "*assistant: bad"])
RECORDS = [
    {"prompt": "q", "chosen": "good", "rejected": "bad", "margin": 2},
    {"images": ["two.png"], "prompt": [USER], "chosen": [GOOD], "rejected": [GOOD | {"content": "bad"}]},
    {"images": ["two.png"], "messages": [USER, GOOD], "rejected_response": "bad", "rejected_images": ["two.png"]},
    {"image": "two.png", "conversations": [{"from": "human", "value": "<image>\nq"}],
     "chosen": {"from": "gpt", "value": "good"}, "rejected": {"from": "gpt", "value": "bad"}},
    {"image": "two.png", "instruction": "q", "chosen": "good", "rejected": "bad"},
    {"prompt": [TYPED | {"content": [{"type": "image", "image": "two.png"}, *TYPED["content"][1:]]}],
     "chosen": [GOOD], "rejected": "bad"},
    {"messages": [USER, GOOD], "images": ["two.png"], "label": False},
]  # fmt: skip


def parsed(folder):
    """(turns of each answer, target) of each sample."""
    preferences = [
        parse_any(json.dumps(record).encode(), "json", "k", {"image": len(extents)})
        for extents, record in found(folder)
    ]
    return [(rendered(preference), preference.target) for preference in preferences]


def test_every_form_keeps_its_answers(tmp_path):
    build(written(tmp_path, RECORDS), tmp_path / "out", media=media_folder(tmp_path))
    *pairs, labelled = parsed(tmp_path / "out" / "train")
    assert [turns for turns, _ in pairs] == [PAIR, *[WITH_IMAGE] * 5] and pairs[0][1] == 2
    assert labelled == (WITH_IMAGE[:1], 0.0)


def test_a_hugging_face_dataset_of_pairs(tmp_path):
    images = [[{"bytes": image(4), "path": None}]] * 2
    answers = [[GOOD, None], [GOOD | {"content": "bad"}, None]]
    table = {"images": images, "question": ["q", "q"], "yes": ["good", "good"], "no": ["bad", "bad"], "by": [0.5, 1.5]}
    folder = hugging_face(tmp_path / "named", table, {"images": [{"_type": "Image"}]})
    columns = {"prompt": "question", "chosen": "yes", "rejected": "no", "margin": "by"}
    build(folder, tmp_path / "out", columns=columns)
    assert parsed(tmp_path / "out" / "train") == [(WITH_IMAGE, 0.5), (WITH_IMAGE, 1.5)]
    table = {"images": images[:1], "prompt": [[TYPED]], "chosen": [answers[0][:1]], "rejected": [answers[1][:1]]}
    folder = hugging_face(tmp_path / "usual", table, {"images": [{"_type": "Image"}]})
    build(folder, tmp_path / "out2")
    assert [turns for turns, _ in parsed(tmp_path / "out2" / "train")] == [WITH_IMAGE]


@pytest.mark.parametrize(
    "record, message",
    [
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "chosen and rejected are equal"),
        (RECORDS[2] | {"rejected_images": ["three.png"]}, "rejected_images differs from images"),
        ({"images": ["two.png"] * 2, "messages": [TYPED, GOOD], "rejected_response": "b"}, "1 image .*2 image members"),
    ],
)
def test_a_pair_that_cannot_be_used_is_named(record, message, tmp_path):
    with pytest.raises(DataError, match=f"record 0: .*{message}"):
        build(written(tmp_path, [record]), tmp_path / "out", media=media_folder(tmp_path))
