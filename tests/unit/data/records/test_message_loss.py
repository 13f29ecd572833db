"""Messages that a record excludes from the loss, and where each learned turn begins."""

import json

import pytest

from data.collate import to_sample
from data.errors import NothingToLearn, RecordError
from data.records.members import read_fields
from data.records.preferences import Preference
from data.records.records import parse_fields
from data.rows.samples import require_learnable
from data.text.tokens import build_tokenizer
from tests.media_tokens import item_of
from tests.unit.data.text.chat_templates import (
    CHATML,
    GEMMA,
    LLAMA,
    LLAVA,
    QWEN3,
    QWEN_VL,
    TOOLS,
    learned,
    marked,
    messages,
    parse,
)

TALK = [
    *[("user", "q1"), ("assistant", "first"), ("user", "q2"), ("assistant", "second")],
    *[("user", "q3"), ("assistant", "third")],
]
EXCLUDED = (
    *({"loss": False}, {"weight": 0}, {"weight": 0.0}, {"train": False}, {"masked": True}),
    {"loss_scale": 0, "loss": False},
)
INCLUDED = ({"loss": True}, {"weight": 1}, {"masked": False}, {"loss": None}, {})
TEMPLATES = {
    "chatml": CHATML, "llama": LLAMA, "gemma": GEMMA, "tools": TOOLS, "qwen3": QWEN3, "qwen_vl": QWEN_VL, "llava": LLAVA
}  # fmt: skip


def talk(second: dict, form: str = "messages") -> dict:
    record = messages(TALK)
    record[3] |= second
    if form == "conversations":
        record = [{"from": one.pop("role"), "value": one.pop("content"), **one} for one in record]
    elif form == "typed":
        record = [one | {"content": [{"type": "text", "text": one["content"]}]} for one in record]
    return {"conversations" if form == "conversations" else "messages": record}


@pytest.mark.parametrize("form", ["messages", "typed", "conversations"])
@pytest.mark.parametrize("fields", [*EXCLUDED, *INCLUDED], ids=str)
def test_every_spelling_in_every_form(fields, form):
    conversation = parse(talk(fields, form))
    assert [turn.is_learned for turn in conversation.turns] == [False, True, False, fields not in EXCLUDED, False, True]
    assert not any(turn.fields for turn in conversation.turns), "a template has no use for them"


@pytest.mark.parametrize("blocks", [False, True], ids=["plain", "blocks"])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_an_excluded_turn_is_not_learned_with_any_template(template, blocks, saved):
    """The tokens stay; only those of the excluded turn leave the loss."""
    tokenizer = build_tokenizer(saved(template, blocks=blocks))
    whole, part = (tokenizer.template.encode(parse(talk(fields)), {}) for fields in ({}, {"loss": False}))
    assert whole.tokens == part.tokens
    first, second, third = learned(tokenizer, whole)
    assert learned(tokenizer, part) == [first, third] and "second" in second
    assert [turn for _, turn in whole.answers] == [1, 3, 5] and [turn for _, turn in part.answers] == [1, 5]
    assert all(part.learned[at] and not part.learned[at - 1] for at, _ in part.answers)


@pytest.mark.parametrize("name", ["bytes", CHATML], ids=["bytes", "own"])
def test_an_excluded_turn_is_not_learned_in_our_format(name, saved):
    tokenizer = build_tokenizer(name if name == "bytes" else saved(name), chat_template="own")
    runs = learned(tokenizer, tokenizer.template.encode(parse(talk({"weight": 0})), {}))
    assert ["first" in runs[0], "third" in runs[1], len(runs)] == [True, True, 2]


def test_blocks_belong_to_the_message_that_wrote_them(saved):
    """A message with two generation blocks, and a later one that is excluded."""
    block = "[{{- message.content + '<|im_end|>' -}}]"
    assert block in CHATML
    template = marked(CHATML.replace(block, "[{{- message.content -}}]~[{{- '<|im_end|>' -}}]"))
    tokenizer = build_tokenizer(saved(CHATML, blocks=True, chat_template=template))
    runs = learned(tokenizer, tokenizer.template.encode(parse(talk({"loss": False})), {}))
    assert runs == ["first", "<|im_end|>", "third", "<|im_end|>"]


@pytest.mark.parametrize(("at", "runs"), [(3, ["third<|im_end|>"]), (5, [])])
def test_a_template_with_a_block_around_the_last_answer_only(at, runs, saved):
    """Each message was the last one while messages were added."""
    block = "[{{- message.content + '<|im_end|>' -}}]"
    inside = "{{- message.content + '<|im_end|>' -}}"
    either = f"{{%- if loop.last -%}}[{inside}]{{%- else -%}}{inside}{{%- endif -%}}"
    tokenizer = build_tokenizer(saved(CHATML, chat_template=marked(CHATML.replace(block, either))))
    record = messages(TALK)
    record[at]["loss"] = False
    encoded = tokenizer.template.encode(parse(record), {})
    assert learned(tokenizer, encoded) == runs and [turn for _, turn in encoded.answers] == [5] * len(runs)


def test_fields_in_a_config_keep_what_messages_exclude():
    fields = read_fields({"messages": "json[talk]"})
    raw = json.dumps({"talk": talk({"weight": 0})["messages"]}).encode()
    assert [turn.is_learned for turn in parse_fields({"json": raw}, fields, "k", {}).turns].count(True) == 2


@pytest.mark.parametrize(
    ("at", "fields", "message"),
    [
        (3, {"weight": 0.5}, r"messages\[3\]: weight is 0.5, expected true, false, 0 or 1"),
        (3, {"loss": "false"}, r"loss is 'false', expected"),
        (3, {"loss": True, "weight": 0}, "loss and weight contradict each other"),
        (3, {"train_detail": [{"begin_offset": 0}]}, "train_detail is not supported"),
        (2, {"train": True}, r"messages\[2\]: train includes a user message in the loss"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_an_error(at, fields, message):
    record = messages(TALK)
    record[at] |= fields
    with pytest.raises(RecordError, match=message):
        parse(record)


def test_a_record_whose_turns_are_all_excluded_has_no_loss():
    record = messages(TALK[:2])
    record[1]["loss"] = False
    conversation, tokenizer = parse(record), build_tokenizer("bytes")
    assert conversation.is_blank
    assert not to_sample(conversation, tokenizer, {}, 64, 0, "k").loss_mask.any()
    with pytest.raises(NothingToLearn, match="row 1: its caption or answers are blank, or excluded from the loss"):
        require_learnable(lambda: Preference((conversation,)), "row 1")


def test_questions_of_every_learned_turn_stand_where_its_labels_begin(saved):
    """Also where an image takes several tokens, in front of an answer and inside one."""
    tokenizer = build_tokenizer(saved(QWEN_VL), ["<image>"])
    image = tokenizer.placeholder_id("<image>")
    talk = [("user", "<image>a"), ("assistant", "one"), ("user", "b"), ("assistant", "<image>two")]
    record = messages([*talk, ("user", "c"), ("assistant", "3")])
    media = {"image": [[item_of([image] * 5)], [item_of([image] * 3)]]}
    sample = to_sample(parse(record, image=2), tokenizer, media, 200, 0, "k", keep_text=True)
    assert [question for _, question in sample.questions] == ["a", "b", "c"]
    starts, texts = [first for first, _ in sample.questions], []
    for first, end in zip(starts, [*starts[1:], 200], strict=True):
        texts.append(tokenizer.shown(sample.labels[first:end][sample.loss_mask[first:end] > 0]))
    assert texts == ["one<|im_end|>", "two<|im_end|>", "3<|im_end|>"]
