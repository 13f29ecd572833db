"""Records of every form, read as conversations: their turns, and errors that name the key and the cause."""

import json
import re

import pytest

from data.errors import NothingToLearn, RecordError
from data.records.conversation import Part, Turn
from data.records.members import read_fields
from data.records.records import parse_fields, parse_record
from data.samples.verify import check_sample
from data.storage.reader import ShardReader
from tests.tars import write_tar
from tests.unit.data.helpers import open_index
from tests.unit.data.text.chat_templates import SCHEMA, llava, messages, parse


def test_llava_and_messages_mean_the_same():
    first = parse(llava(("system", "s"), ("human", "<image>\nq"), ("gpt", "a")), image=1)
    parts = [{"type": "image", "image": "x.jpg"}, {"type": "text", "text": "q"}]
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "a"},
    ]
    assert parse({"messages": messages}, image=1) == first
    assert [turn.role for turn in first.turns] == ["system", "user", "assistant"]
    assert first.turns[1].parts == (Part("image"), Part("text", "q"))


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("<image>\nq", [None, "q"]),
        ("q\n<image>", ["q", None]),
        ("<image>\n<image>\r\nq", [None, None, "q"]),
        ("a\n<image>\nb", ["a", None, "b"]),
        ("<image>\n\nq", [None, "\nq"]),
        ("Is <image> like <image>?\n", ["Is ", None, " like ", None, "?\n"]),
    ],
)
def test_a_line_break_next_to_a_marker_separates_and_is_no_text(text, pieces):
    parts = tuple(Part("image") if piece is None else Part("text", piece) for piece in pieces)
    assert parse(llava(("human", text), ("gpt", "a")), image=pieces.count(None)).turns[0].parts == parts


def test_captions():
    assert parse(b"a cat", "txt", image=2) == parse({"caption": "a cat"}, image=2) == parse({"text": "a cat"}, image=2)
    turns = parse(b"a cat", "txt", image=2).turns
    assert [(turn.role, len(turn.parts)) for turn in turns] == [("user", 2), ("assistant", 1)]
    assert parse(b"\xef\xbb\xbfprose", "txt", image=0).turns == (Turn("plain", (Part("text", "prose"),)),)


def test_text_of_typed_parts_is_literal():
    content = [{"type": "text", "text": "what is <image>?"}]
    record = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "a tag"}]}
    assert parse(record).count("image") == 0


@pytest.mark.parametrize(
    ("record", "images", "words"),
    [
        (llava(("human", "<image><image>q"), ("gpt", "a")), 1, ["2 image placeholder", "1 image member"]),
        (llava(("human", "q"), ("gpt", "a")), 3, ["0 image placeholder", "3 image member"]),
        (llava(("human", "<audio>q"), ("gpt", "a")), 0, ["1 audio", "no module"]),
        (llava(("human", "q")), 0, ["no assistant turn"]),
        (llava(("bird", "q"), ("gpt", "a")), 0, ["bird", r"conversations\[0\]"]),
        ({"conversations": []}, 0, ["not a list"]),
        ({"messages": [{"role": "user", "content": [{"type": "film"}]}]}, 0, ["film"]),
        ({"messages": [{"role": "user", "content": 7}]}, 0, ["content is a number, neither text nor"]),
        ({"messages": [{"role": [], "content": "q"}]}, 0, ["unknown role"]),
        ({"image": "x"}, 0, ["none of conversations", "image"]),
        (b"[1]", 0, ["list"]),
        (b"{broken", 0, ["not JSON"]),
        (b"\xff\xfe", 0, ["not UTF-8"]),
        (b"[" * 100000, 0, ["not JSON"]),
    ],
)
def test_record_errors_name_the_key_and_the_cause(record, images, words):
    with pytest.raises(RecordError, match="k7") as caught:
        parse(record, image=images)
    for word in words:
        assert re.search(word, str(caught.value)), (word, str(caught.value))


def test_system_texts_and_tools_of_a_record():
    talk = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
    conversation = parse(talk | {"system": "s", "tools": json.dumps([SCHEMA])})
    assert (
        conversation.tools == (SCHEMA,)
        and conversation.turns == parse(messages([("system", "s"), ("user", "q"), ("assistant", "a")])).turns
    )
    for extra, words in (
        ({"tools": "{"}, "not JSON"),
        ({"tools": ["x"]}, "not a list of objects"),
        ({"system": "s", "conversations": [{"from": "system", "value": "s"}, *talk["conversations"]]}, "a system turn"),
    ):
        with pytest.raises(RecordError, match=f"k7.*{words}"):
            parse(talk | extra)


@pytest.mark.parametrize(
    "record",
    [
        {"caption": "a \ud83d b"},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "\ude00"}]},
        {"messages": [{"role": "assistant", "content": [{"type": "text", "text": "\ud800"}]}]},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x", "name": "\ud800"}]},
        {"messages": [{"role": "assistant", "content": "x"}], "tools": [{"description": "\ud800"}]},
        {"system": "\udfff", "messages": [{"role": "assistant", "content": "x"}]},
    ],
)
def test_half_of_a_surrogate_pair_makes_a_bad_sample(record, tmp_path):
    raw = json.dumps(record).encode()
    with pytest.raises(RecordError, match=r"key '7': \\ud[89a-f]00|\\udfff|\\ud83d"):
        parse_record(raw, "json", "7", {})
    index = open_index(write_tar(tmp_path / "x.tar", [("7.json", raw)]))
    assert "half of a surrogate pair" in check_sample(ShardReader(), index, 0)


def test_whole_pairs_and_unread_fields_are_no_fault():
    with pytest.raises(RecordError, match="surrogate"):
        parse_fields({"json": b'{"a": "\\ud83d"}'}, read_fields({"caption": "json[a]"}), "7", {})
    record = {"caption": "a \U0001f600 b", "exif": "\ud83d"}
    (turn,) = parse_record(json.dumps(record).encode(), "json", "7", {}).turns
    assert turn.text == "a \U0001f600 b"


def fields(given, raws, **media):
    return parse_fields({name: raw.encode() for name, raw in raws.items()}, read_fields(given), "k", media)


def test_fields_say_what_the_record_is():
    given = {"caption": "caption.txt", "label": "cls"}
    assert fields(given, {"caption.txt": "a cat", "cls": "7"}, image=1).turns[1].text == "a cat"
    assert fields(given, {"cls": "7\n"}, image=1).turns[1].text == "7"
    inner = {"question": "json[qa][q]", "answer": "json[qa][a][0]", "system": "json[s]?"}
    raw = json.dumps({"qa": {"q": "What?", "a": ["red", "blue"]}, "s": "Be brief."})
    talk = fields(inner, {"json": raw}, image=2)
    assert [turn.role for turn in talk.turns] == ["system", "user", "assistant"]
    assert talk.turns[1].parts == (Part("image"), Part("image"), Part("text", "What?"))
    assert talk.turns[2].text == "red"
    marked = fields(inner, {"json": json.dumps({"qa": {"q": "Is <image> red?", "a": ["no"]}})}, image=1)
    assert marked.turns[0].parts == (Part("text", "Is "), Part("image"), Part("text", " red?"))
    with pytest.raises(NothingToLearn, match="answer is null"):
        fields(inner, {"json": '{"qa": {"q": null, "a": [null]}, "s": null}'}, image=0)
    assert fields({"label": "json[n]"}, {"json": '{"n": 3}'}).turns[0].text == "3"
    for wrong, said in (('{"n": [3]}', "is a list, not a text"), ("{", "not JSON")):
        with pytest.raises(RecordError, match=said):
            fields({"label": "json[n]"}, {"json": wrong})


def test_a_text_that_is_named_and_not_there_is_no_null():
    given = {"question": "json[q]", "answer": "json[a][0]", "caption": "txt", "system": "json[s]?"}
    assert [turn.role for turn in fields(given, {"json": '{"q": "Why?", "a": ["So."]}'}).turns] == ["user", "assistant"]
    for raws, said in (
        (
            {"json": '{"q": "Why?", "a": []}'},
            r"data.fields.answer: the sample has no json\[a\]\[0\] and no txt; its json has \['a', 'q'\]$",
        ),
        ({"json": "[]"}, r"data.fields.answer: the sample has no json\[a\]\[0\] and no txt$"),
        (
            {"json": "{}", "txt": "So."},
            r'fields.question: the sample has no json\[q\]; its json has \[\]. If .* question: "json\[q\]\?"',
        ),
    ):
        with pytest.raises(RecordError, match=said) as raised:
            fields(given, raws)
        assert not isinstance(raised.value, NothingToLearn)
    # A question goes with an answer, not with turns.
    whole = {"messages": "json[m]", "question": "json[q]", "answer": "json[a]"}
    said = json.dumps({"m": [{"role": "user", "content": "Hm?"}, {"role": "assistant", "content": "Ja."}]})
    assert len(fields(whole, {"json": said}).turns) == 2
    own = read_fields({"label": "json[n]"}, "data.mix[3].fields")
    assert own == read_fields({"label": "json[n]"})
    with pytest.raises(RecordError, match=r"data.mix\[3\].fields.label: the sample has no json\[n\]"):
        parse_fields({"json": b"{}"}, own, "k", {})


def test_a_system_text_has_a_place_or_is_refused():
    given = {"caption": "txt", "system": "json[s]"}
    talk = fields(given, {"txt": "a cat", "json": '{"s": "Be brief."}'}, image=1)
    assert [turn.role for turn in talk.turns] == ["system", "user", "assistant"]
    with pytest.raises(RecordError, match="a text alone has no place for a system text"):
        fields(given, {"txt": "a cat", "json": '{"s": "Be brief."}'})
    with pytest.raises(RecordError, match="system is a list, not a text"):
        fields(given, {"txt": "a cat", "json": '{"s": ["Be brief."]}'}, image=1)
