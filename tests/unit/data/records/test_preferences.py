"""Records of preferences: record -> turns of each answer, and which of them are learned."""

import json
import math
from typing import Any

import pytest

from data.errors import NothingToLearn, RecordError
from data.records.members import read_fields
from data.records.preferences import Preference, parse_preference
from data.records.records import parse_fields, parse_record

USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "good"), ("assistant", "bad"))
)
SYSTEM = {"role": "system", "content": "s"}
HUMAN, GPT, WRONG = ({"from": name, "value": text} for name, text in (("human", "q"), ("gpt", "good"), ("gpt", "bad")))
TYPED = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "q"}]}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
TOOL = {"role": "tool", "content": "42"}
TEXTS = {"prompt": "q", "chosen": "good", "rejected": "bad"}
PAIR = (["user: q", "*assistant: good"], ["user: q", "*assistant: bad"])
EARLIER = ["user: q", "assistant: good"]


def read(record: Any, form: str = "pairs", **media: int) -> Preference:
    return parse_preference(json.dumps(record).encode(), "json", "k", media, form=form)


def rendered(preference: Preference) -> tuple[list[str], ...]:
    """Return the turns of each answer as text; learned turns have a star."""
    return tuple(
        [
            f"{'*' * turn.is_learned}{turn.role}: "
            + "".join(part.text if part.kind == "text" else f"<{part.kind}>" for part in turn.parts)
            for turn in answer.turns
        ]
        for answer in preference.answers
    )


PAIRS: dict[str, tuple[dict[str, Any], tuple[list[str], ...]]] = {
    # TRL
    "texts": (TEXTS, PAIR),
    "messages": ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, PAIR),
    "implicit": ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, PAIR),
    "from and value": ({"prompt": [HUMAN], "chosen": [GPT], "rejected": [WRONG]}, PAIR),
    "repeated text": ({"prompt": "q", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, PAIR),
    "repeated messages": ({"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, PAIR),
    "text and messages": ({"prompt": "q", "chosen": [GOOD], "rejected": "bad"}, PAIR),
    "nulls of a table": (TEXTS | {"messages": None, "rejected_response": None, "margin": None}, PAIR),
    "system": (TEXTS | {"system": "s"}, (["system: s", *PAIR[0]], ["system: s", *PAIR[1]])),
    "earlier answers": (
        {"chosen": [SYSTEM, USER, GOOD, USER, GOOD], "rejected": [SYSTEM, USER, GOOD, USER, BAD]},
        (["system: s", *EARLIER, *PAIR[0]], ["system: s", *EARLIER, *PAIR[1]]),
    ),
    "several turns of an answer": (
        {"prompt": [USER], "chosen": [GOOD, USER, GOOD], "rejected": [BAD]},
        (["user: q", "*assistant: good", *PAIR[0]], PAIR[1]),
    ),
    "several turns after a text": (
        {"prompt": "q", "chosen": [GOOD, USER, GOOD], "rejected": "bad"},
        (["user: q", "*assistant: good", *PAIR[0]], PAIR[1]),
    ),
    "excluded turn of an answer": (
        {"prompt": [USER], "chosen": [GOOD | {"weight": 0}, USER, GOOD], "rejected": [BAD]},
        ([*EARLIER, *PAIR[0]], PAIR[1]),
    ),
    "plain": (
        {"chosen": "Human: q\nBot: I can", "rejected": "Human: q\nBot: It does"},
        (["plain: Human: q\nBot:", "*plain:  I can"], ["plain: Human: q\nBot:", "*plain:  It does"]),
    ),
    "plain without common words": ({"chosen": "ab", "rejected": "ac d"}, (["*plain: ab"], ["*plain: ac d"])),
    # ms-swift
    "rejected response": ({"messages": [USER, GOOD], "rejected_response": "bad"}, PAIR),
    "rejected response of several turns": (
        {"messages": [USER, GOOD, USER, CALL, TOOL, GOOD], "rejected_response": [CALL, TOOL, BAD]},
        (
            [*EARLIER, "user: q", "*assistant: ", "tool: 42", "*assistant: good"],
            [*EARLIER, "user: q", "*assistant: ", "tool: 42", "*assistant: bad"],
        ),
    ),
    "rejected messages": (
        {"messages": [USER, GOOD, USER, GOOD], "rejected_messages": [USER, GOOD, USER, BAD]},
        ([*EARLIER, *PAIR[0]], [*EARLIER, *PAIR[1]]),
    ),
    "rejected messages of another question": (
        {"messages": [USER, GOOD], "rejected_messages": [USER | {"content": "other"}, GOOD]},
        (PAIR[0], ["user: other", "*assistant: good"]),
    ),
    # LLaMA-Factory
    "ranking": ({"conversations": [HUMAN], "chosen": GPT, "rejected": WRONG}, PAIR),
    "ranking after turns": (
        {"conversations": [HUMAN, GPT, HUMAN], "chosen": GPT, "rejected": WRONG},
        ([*EARLIER, *PAIR[0]], [*EARLIER, *PAIR[1]]),
    ),
    "alpaca": ({"instruction": "q", "input": "", "chosen": "good", "rejected": "bad"}, PAIR),
    "alpaca with input and history": (
        {"instruction": "q", "input": "i", "history": [["a", "b"]], "system": "s", "chosen": "good", "rejected": "bad"},
        (
            ["system: s", "user: a", "assistant: b", "user: q\ni", "*assistant: good"],
            ["system: s", "user: a", "assistant: b", "user: q\ni", "*assistant: bad"],
        ),
    ),
}
IMAGES = {
    "unmarked": TEXTS,
    "marked": TEXTS | {"prompt": "<image>\nq"},
    "marker of another family": TEXTS | {"prompt": "<|vision_start|><|image_pad|><|vision_end|>q"},
    "typed": {"prompt": [TYPED], "chosen": [GOOD], "rejected": [BAD]},
    "implicit": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "typed rejected messages": {"messages": [TYPED, GOOD], "rejected_messages": [TYPED, BAD]},
    "equal images": TEXTS | {"images": ["a.png"], "rejected_images": ["a.png"]},
}
LABELS: tuple[dict[str, Any], ...] = (
    {"prompt": "q", "completion": "good"},
    {"prompt": [USER], "completion": [GOOD]},
    {"messages": [USER, GOOD]},
    {"conversations": [HUMAN, GPT]},
    {"instruction": "q", "output": "good"},
)


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name: str) -> None:
    record, turns = PAIRS[name]
    preference = read(record)
    assert rendered(preference) == turns and math.isnan(preference.target)
    assert read(record | {"margin": 0.5}).target == 0.5


@pytest.mark.parametrize("name", IMAGES)
def test_media_of_pairs(name: str) -> None:
    expected = (["user: <image>q", "*assistant: good"], ["user: <image>q", "*assistant: bad"])
    assert rendered(read(IMAGES[name], image=1)) == expected


def test_texts_without_a_prompt_are_captions_of_an_image() -> None:
    expected = (["user: <image>", "*assistant: a b"], ["user: <image>", "*assistant: a c"])
    assert rendered(read({"chosen": "a b", "rejected": "a c"}, image=1)) == expected


def test_tools() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "fg"]
    for record, expected in (
        (TEXTS | {"tools": json.dumps(tools)}, [tools, tools]),
        (TEXTS | {"tools": tools, "rejected_tools": tools[1:]}, [tools, tools[1:]]),
    ):
        assert [list(answer.tools) for answer in read(record).answers] == expected


@pytest.mark.parametrize("record", LABELS)
def test_labels(record: dict[str, Any]) -> None:
    for name in ("label", "kto_tag"):
        for label, target in ((True, 1.0), (False, 0.0), (1, 1.0)):
            preference = read(record | {name: label}, "labels")
            assert (rendered(preference), preference.target) == (PAIR[:1], target)


ERRORS: tuple[tuple[str, Any, str], ...] = (
    ("pairs", {"messages": [USER, GOOD]}, "no pair of answers .*messages.*train.task=sft"),
    ("pairs", "text", "is a text, not an object"),
    ("pairs", TEXTS | {"chosen": None}, "chosen is null or missing"),
    ("pairs", TEXTS | {"rejected": " "}, "rejected is blank"),
    ("pairs", {"prompt": [USER], "chosen": [GOOD | {"weight": 0}], "rejected": [BAD]}, "chosen is blank, or excluded"),
    ("pairs", TEXTS | {"rejected": "good"}, "chosen and rejected are equal"),
    ("pairs", {"messages": [USER, GOOD], "rejected_response": "good"}, "messages and rejected_response are equal"),
    ("pairs", TEXTS | {"rejected_response": "c"}, "rejected and rejected_response are different names"),
    ("pairs", {"chosen": [USER, GOOD], "rejected": [USER]}, "rejected: messages has no assistant"),
    ("pairs", TEXTS | {"chosen": ["a"]}, "chosen is a list"),
    ("pairs", TEXTS | {"prompt": 3}, "prompt is a number"),
    ("pairs", TEXTS | {"margin": "big"}, "margin is 'big'"),
    ("pairs", TEXTS | {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs are not supported"),
    ("pairs", TEXTS | {"images": ["a"], "rejected_images": ["b"]}, "rejected_images differs from images"),
    ("pairs", TEXTS | {"prompt": "<image>q"}, "refers to 1 image"),
    ("pairs", {"messages": [USER], "rejected_response": "bad"}, "messages ends in a user turn"),
    ("pairs", {"messages": [USER, GOOD], "rejected_response": [USER, BAD]}, "rejected_response has a user turn"),
    ("pairs", {"rejected_response": "bad"}, "no messages with the other answer"),
    ("pairs", {"instruction": "q", "history": ["a"], "chosen": "a", "rejected": "b"}, "history must be"),
    ("pairs", {"prompt": "q", "completion": "a", "label": True}, "no pair of answers"),
    ("labels", TEXTS | {"label": True}, "no answer with a label.*train.task=dpo"),
    ("labels", {"messages": [USER, GOOD]}, "no answer with a label.*train.task=sft"),
    ("labels", {"prompt": "q", "completion": "a", "label": "good"}, "label is 'good', expected true or false"),
    ("labels", {"prompt": "q", "completion": None, "label": True}, "completion is null or missing"),
    ("labels", {"completion": "a", "label": True}, "no prompt"),
    ("turns", TEXTS, "chosen and rejected: a record of preferences.*train.task=dpo"),
    ("turns", {"messages": [USER, GOOD], "rejected_response": "b"}, "rejected_response: a record of preferences"),
    ("turns", {"messages": [USER, GOOD], "label": False}, "label: a record of preferences.*train.task=kto"),
)


@pytest.mark.parametrize("form, record, message", ERRORS)
def test_errors(form: str, record: Any, message: str) -> None:
    with pytest.raises(RecordError, match=f"^key 'k': .*{message}") as error:
        if form == "turns":
            parse_record(json.dumps(record).encode(), "json", "k", {})
        read(record, form)
    assert isinstance(error.value, NothingToLearn) == any(word in message for word in ("null", "blank"))


def test_fields_of_preferences_are_not_those_of_turns() -> None:
    raws = {"json": json.dumps({"a": "q", "b": "good", "c": "bad"}).encode()}
    for fields, message in (
        ({"prompt": "json[a]", "chosen": "json[b]", "rejected": "json[c]"}, "chosen and rejected: a record of pref"),
        ({"prompt": "json[a]", "completion": "json[b]"}, "data.fields.prompt: train.task=sft does not read it"),
    ):
        with pytest.raises(RecordError, match=message):
            parse_fields(raws, read_fields(fields), "k", {})
