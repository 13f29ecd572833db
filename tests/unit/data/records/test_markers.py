"""Markers of media as other families write them: places where they stand for media, text or an error where not."""

import json

import pytest

from data.errors import RecordError
from data.records.conversation import MARKERS, Part, Visual
from data.records.members import read_fields
from data.records.records import parse_fields, parse_record
from data.rows.samples import MARKED, _with_texts

IMAGE = (
    "<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|><|image_pad|>",
    "<img><IMG_CONTEXT><IMG_CONTEXT></img>",
    "<IMG_CONTEXT>", "<start_of_image>", "<start_of_image><image_soft_token><end_of_image>", "<|image|>", "<|image_1|>",
    "<|begin_of_image|><|image|><|end_of_image|>", "<image_0>", "<image 1>",
    "<Img><ImageHere></Img>", "<image_placeholder>",
    "<|media_start|>image<|media_content|><|media_pad|><|media_end|>", "<image>./</image>",
    "<img>coco/1.jpg</img>", "<Image>", "<Image></Image>", "[IMG]",
)  # fmt: skip
AUDIO = ("<|audio_bos|><|AUDIO|><|audio_eos|>", "<|AUDIO|>", "<|audio_start|><|audio_pad|><|audio_end|>", "<|audio_1|>",
    "<audio>a.wav</audio>", "<|audio|>", "[AUDIO]", "<Audio>")  # fmt: skip
VIDEO = ("<|vision_start|><|video_pad|><|vision_end|>", "<|video|>", "<video>a.mp4</video>", "<Video>")
CASES = [(kind, marker) for kind, own in (("image", IMAGE), ("audio", AUDIO), ("video", VIDEO)) for marker in own]


def record(question: str, answer: str = "a", form: str = "conversations") -> dict:
    if form == "messages":
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}


def parts(question: str, media: dict[str, int], answer: str = "a"):
    raw = json.dumps(record(question, answer)).encode()
    return parse_record(raw, "json", "k", media).turns[0].parts


@pytest.mark.parametrize(("kind", "marker"), CASES)
def test_they_are_places_of_media_where_they_stand(kind, marker):
    media = {"image": 0, "audio": 0, kind: 1}
    if kind == "video":
        # Its images, of which the sample has one.
        media, kind = {"image": 1}, "image"
        marker = marker.replace("<Video>", "<|video_pad|>")
        raw = json.dumps(record(f"what is {marker}\nthis?", form="messages")).encode()
        found = parse_record(raw, "json", "k", media, visuals=[Visual("0.jpg", 0)]).turns[0].parts
    else:
        found = parts(f"what is {marker}\nthis?", media)
    assert found == (Part("text", "what is "), Part(kind), Part("text", "this?"))


def test_words_between_two_markers_are_kept():
    assert parts("<image>what is it</image>", {"image": 1}) == (Part("image"), Part("text", "what is it</image>"))
    assert parts("<image>my images/a 1.jpg</image>\nq", {"image": 1}) == (Part("image"), Part("text", "q"))
    with pytest.raises(RecordError, match="0 image placeholders, but the sample has 1"):
        parts("<img>what is it</img>", {"image": 1})


def test_several_in_order_and_beside_ours():
    place = Part("image")
    found = parts("<image>\nWhat is [IMG]?", {"image": 1}, answer="<Image></Image>")
    assert found == (place, Part("text", "What is [IMG]?")), "our markers are enough"
    assert parts("<image_1><image_2>\nq", {"image": 2}) == (place, place, Part("text", "q"))
    assert parts("<image>\n[IMG]q", {"image": 2}) == (place, place, Part("text", "q"))
    two = "<|vision_start|><|image_pad|><|vision_end|>" * 2
    assert parts(f"{two}q", {"image": 2}) == (place, place, Part("text", "q"))


@pytest.mark.parametrize("marker", ["[IMG]", "<img>a</img>", "<Image>", "[IMG]http://a.b/c.png[/IMG]", "<|image_pad|>"])
def test_without_media_they_are_text(marker):
    """In a run without encoders, and in one that has media what is not a special token."""
    assert parts(f"say {marker}", {}) == (Part("text", f"say {marker}"),)
    if marker != "<|image_pad|>":
        assert parts(f"say {marker}", {"image": 0}) == (Part("text", f"say {marker}"),)
    else:
        with pytest.raises(RecordError, match="1 image placeholder, but the sample has 0"):
            parts(f"say {marker}", {"image": 0})


@pytest.mark.parametrize(
    ("question", "answer", "media", "message"),
    [
        ("[IMG] or [IMG]?", "a", {"image": 1}, r"0 <image> and 2 markers such as '\[IMG\]', but the sample has"),
        ("q", "[IMG]", {"image": 1}, "0 image placeholders, but the sample has 1"),  # an answer is no place for these
        ("<image_2> or <image_1>?", "a", {"image": 2}, "<image_2> marks the place"),
        ("<image_1> or <image_1>?", "a", {"image": 2}, "<image_1> marks the place"),
        ("<image>\nq", "<|image_pad|>", {"image": 1}, "2 image placeholders, but the sample has 1"),
    ],
)
def test_what_does_not_fit_the_media_is_an_error(question, answer, media, message):
    with pytest.raises(RecordError, match=message):
        parts(question, media, answer)


def test_captions_and_named_fields():
    with pytest.raises(RecordError, match=r"the caption: <\|vision_start\|>.* marks the place of an image"):
        parse_record(b"<|vision_start|><|image_pad|><|vision_end|>A cat", "txt", "k", {"image": 1})
    fields = read_fields({"question": "json[q]", "answer": "json[a]"})
    raws = {"json": json.dumps({"q": "Is [IMG] red?", "a": "no"}).encode()}
    turns = parse_fields(raws, fields, "k", {"image": 1}).turns
    assert turns[0].parts == (Part("text", "Is "), Part("image"), Part("text", " red?"))
    with pytest.raises(RecordError, match="question has 0 <image> and 1 marker such as"):
        parse_fields(raws, fields, "k", {"image": 2})


def test_a_build_puts_no_media_in_front_of_them():
    counts = dict.fromkeys(MARKERS.values(), 0) | {"image": 1}
    for question in ("<|vision_start|><|image_pad|><|vision_end|>q", "<img>1.jpg</img>q"):
        given = record(question)
        assert _with_texts(given, {}, "", counts, "row 1") == (given, ())
        asked, _ = _with_texts({}, {"question": question, "answer": "x"}, "", counts, "row 1")
        assert asked["conversations"][0]["value"] == question
    made, rules = _with_texts(record("q"), {}, "", counts, "row 1")
    assert made["conversations"][0]["value"] == "<image>\nq" and rules == (MARKED,)
    with pytest.raises(RecordError, match="row 1: its text has 0 <image> and 2 markers"):
        _with_texts(record("[IMG][IMG]q"), {}, "", counts, "row 1")
    typed = record("q", form="messages")
    typed["messages"][0]["content"] = [{"type": "text", "text": "<|image_pad|>q"}]
    with pytest.raises(RecordError, match=r"row 1: a typed text has <\|image_pad\|>, and typed text is literal"):
        _with_texts(typed, {}, "", counts, "row 1")


def test_a_build_keeps_what_pairs_exclude_from_the_loss():
    pairs = [{"user": "q", "assistant": "a", "loss": False}, {"user": "r", "assistant": "b", "source": "x"}]
    made, _ = _with_texts({"texts": pairs}, {}, "", {"image": 0}, "row 1")
    turns = parse_record(json.dumps(made).encode(), "json", "k", {}).turns
    assert [turn.is_learned for turn in turns] == [False, False, False, True]


@pytest.mark.parametrize("marker", ["<speech>", "<image_1>", "<|image_1|>", "<image 2>", "<|audio|>"])
def test_a_marker_that_nothing_takes_is_never_text(marker):
    for record in (
        {"conversations": [{"from": "human", "value": f"{marker}\nq"}, {"from": "gpt", "value": "a"}]},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": f"see {marker}"}]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": marker},
        {"caption": f"{marker} a cat"},
        {"caption": "<image> a cat"},
    ):
        with pytest.raises(RecordError, match="marks the place of an image|1 image placeholder|refers to 1 audio"):
            parse_record(json.dumps(record).encode(), "json", "k", {"image": 0})
    literal = [{"type": "text", "text": marker}]
    record = {"messages": [{"role": "user", "content": literal}, {"role": "assistant", "content": "a"}]}
    assert parse_record(json.dumps(record).encode(), "json", "k", {}).turns[0].text == marker
    # A text for a language model alone may be about HTML.
    assert parse_record(f"the tag {marker}".encode(), "txt", "k", {}).turns[0].text == f"the tag {marker}"
