"""Records of preferences: record -> turns of each answer, and which of them are learned."""

import json
import math

import pytest

from data.errors import NothingToLearn, RecordError
from data.records.preferences import Preference, parse_preference
from data.records.records import parse_record

USER, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "good"), ("assistant", "bad"))
)
SYSTEM = {"role": "system", "content": "s"}
PAIR = (["user: q", "*assistant: good"], ["user: q", "*assistant: bad"])


def read(record: object, form: str = "pairs", **media: int) -> Preference:
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


PAIRS = {
    "texts": ({"prompt": "q", "chosen": "good", "rejected": "bad"}, PAIR),
    "messages": ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, PAIR),
    "implicit": ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, PAIR),
    "prompt repeated": ({"prompt": "q", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, PAIR),
    "text and messages": ({"prompt": "q", "chosen": [GOOD], "rejected": "bad"}, PAIR),
    "system": (
        {"system": "s", "prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        (["system: s", *PAIR[0]], ["system: s", *PAIR[1]]),
    ),
    "earlier answers": (
        {"chosen": [SYSTEM, USER, GOOD, USER, GOOD], "rejected": [SYSTEM, USER, GOOD, USER, BAD]},
        (
            ["system: s", "user: q", "assistant: good", *PAIR[0]],
            ["system: s", "user: q", "assistant: good", *PAIR[1]],
        ),
    ),
    "several turns of an answer": (
        {"prompt": [USER], "chosen": [GOOD, USER, GOOD], "rejected": [BAD]},
        (["user: q", "*assistant: good", *PAIR[0]], PAIR[1]),
    ),
    "plain": (
        {"chosen": "Human: q\nBot: I can", "rejected": "Human: q\nBot: It does"},
        (["plain: Human: q\nBot:", "*plain:  I can"], ["plain: Human: q\nBot:", "*plain:  It does"]),
    ),
    "plain without common words": ({"chosen": "ab", "rejected": "ac d"}, (["*plain: ab"], ["*plain: ac d"])),
}
IMAGES = {
    "unmarked": {"prompt": "q", "chosen": "good", "rejected": "bad"},
    "marked": {"prompt": "<image>\nq", "chosen": "good", "rejected": "bad"},
    "typed": {
        "prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "q"}]}],
        "chosen": [GOOD],
        "rejected": [BAD],
    },
    "repeated": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "same rejected images": {
        "prompt": "q", "chosen": "good", "rejected": "bad", "images": ["a.png"], "rejected_images": ["a.png"]
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name: str) -> None:
    record, turns = PAIRS[name]
    preference = read(record)
    assert rendered(preference) == turns and math.isnan(preference.target)
    assert read(record | {"margin": 0.5}).target == 0.5


@pytest.mark.parametrize("name", IMAGES)
def test_images_of_pairs(name: str) -> None:
    expected = (["user: <image>q", "*assistant: good"], ["user: <image>q", "*assistant: bad"])
    assert rendered(read(IMAGES[name], image=1)) == expected


def test_tools_are_of_both_answers() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    preference = read({"prompt": "q", "chosen": "a", "rejected": "b", "tools": json.dumps(tools)})
    assert [list(answer.tools) for answer in preference.answers] == [tools, tools]


def test_labels() -> None:
    for label, target in ((True, 1.0), (False, 0.0), (1, 1.0)):
        preference = read({"prompt": "q", "completion": "good", "label": label}, "labels")
        assert (rendered(preference), preference.target) == (PAIR[:1], target)


ERRORS = (
    ({"messages": [USER, GOOD]}, "no pair of answers .*messages.*train.task=sft", RecordError),
    ({"prompt": "q", "chosen": "a"}, "rejected is missing", NothingToLearn),
    ({"prompt": "q", "chosen": "a", "rejected": None}, "rejected is null", NothingToLearn),
    ({"prompt": "q", "chosen": "a", "rejected": " "}, "rejected is blank", NothingToLearn),
    ({"prompt": "q", "chosen": "a", "rejected": "a"}, "equal", RecordError),
    ({"chosen": [USER, GOOD], "rejected": [USER]}, "rejected: messages has no assistant", RecordError),
    ({"prompt": "q", "chosen": ["a"], "rejected": "b"}, "chosen is a list", RecordError),
    ({"prompt": 3, "chosen": "a", "rejected": "b"}, "prompt is a number", RecordError),
    ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": "big"}, "margin is 'big'", RecordError),
    (
        {"prompt": "q", "chosen": "a", "rejected": "b", "images": ["a"], "rejected_images": ["b"]},
        "rejected_images differs from images",
        RecordError,
    ),
    ({"prompt": "<image>q", "chosen": "a", "rejected": "b"}, "refers to 1 image", RecordError),
)


@pytest.mark.parametrize("record, message, error", ERRORS)
def test_errors(record: object, message: str, error: type[RecordError]) -> None:
    with pytest.raises(error, match=f"key 'k': .*{message}"):
        read(record)


def test_a_record_of_another_form() -> None:
    for record in ({"prompt": "q", "chosen": "a", "rejected": "b"}, {"messages": [USER, GOOD], "rejected": "b"}):
        with pytest.raises(RecordError, match="answer of a preference.*train.task"):
            parse_record(json.dumps(record).encode(), "json", "k", {})
        with pytest.raises(RecordError, match="no completion with a label"):
            read(record, "labels")
    with pytest.raises(RecordError, match="no pair of answers"):
        read({"prompt": "q", "completion": "a", "label": True})
