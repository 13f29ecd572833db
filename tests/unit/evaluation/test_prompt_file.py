"""Prompts of a file: the forms that people write, and what is wrong with others."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from mimo_train.config.errors import UserError
from mimo_train.evaluation.generation.prompts import Prompt, Prompts
from mimo_train.evaluation.prompt_file import PromptFile
from mimo_train.inputs.datasets import tokenizer_of
from tests.unit.configs import load


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    cfg = load("vlm_digits")
    return Prompts(cfg, tokenizer_of(cfg))


@pytest.fixture(autouse=True)
def images(tmp_path):
    Image.linear_gradient("L").resize((16, 16)).convert("RGB").save(tmp_path / "a.png")
    Image.new("RGB", (16, 16), "red").save(tmp_path / "b.png")


def read(folder: Path, prompts: Prompts, *lines: str, continues: bool = False) -> list[Prompt]:
    path = folder / "prompts.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    file = PromptFile(path)
    return [file.prompt(at, prompts, continues) for at in range(len(file.records))]


def same(one: Prompt, other: Prompt) -> bool:
    pixels = [each.inputs["images"] for each in (one, other)]
    if None in pixels:
        return one.ids == other.ids and pixels == [None, None]
    values = [each["images"]["images"] if "images" in each["images"] else each["images"] for each in pixels]
    tensors = [value if isinstance(value, torch.Tensor) else next(iter(value.values())) for value in values]
    return one.ids == other.ids and torch.equal(*tensors)


@pytest.mark.parametrize("names", [["a.png"], ["a.png", "b.png"]])
def test_all_ways_to_write_a_prompt_are_the_same_prompt(names, prompts, tmp_path):
    text, marked = "Which digit?", "<image>" * len(names) + "Which digit?"
    typed = [*({"type": "image", "image": name} for name in names), {"type": "text", "text": text}]
    urls = [*({"type": "image_url", "image_url": {"url": f"file://{name}"}} for name in names), typed[-1]]
    places = [*({"type": "image"} for _ in names), typed[-1]]
    ways = [
        {"prompt": text, "images": names, "id": 3},
        {"prompt": marked, "image": names},
        *({"messages": [{"role": "user", "content": content}]} for content in (typed, urls)),
        *({"messages": [{"role": "user", "content": content}], "images": names} for content in (text, marked, places)),
    ]
    first, *others = read(tmp_path, prompts, *map(json.dumps, ways))
    assert first.rows["images"] == 16 * len(names) and all(same(first, other) for other in others)
    reverse, *_ = read(tmp_path, prompts, json.dumps({"prompt": text, "images": ["b.png", *names][: len(names)]}))
    assert not same(first, reverse)
    separated, *_ = read(tmp_path, prompts, json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False))
    assert separated.ids == read(tmp_path, prompts, json.dumps({"prompt": "a\u2028b"}))[0].ids


def test_a_system_text_and_earlier_turns_come_first(prompts, tmp_path):
    turns = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Yes?"), ("user", "Which?")]
    messages = [{"role": role, "content": text} for role, text in turns]
    whole, short, apart, text = read(
        tmp_path,
        prompts,
        json.dumps({"messages": messages}),
        json.dumps({"messages": messages[:2]}),
        json.dumps({"prompt": "Hi", "system": "Be brief."}),
        json.dumps({"prompt": "Hi"}),
    )
    (same_roles,) = read(tmp_path, prompts, json.dumps({"messages": [{"role": "human", "content": "Hi\u2028"}]}))
    (broken_line,) = read(tmp_path, prompts, json.dumps({"prompt": "Hi\u2028"}, ensure_ascii=False))
    assert same_roles.ids == broken_line.ids
    assert whole.ids[: len(short.ids)] == short.ids == apart.ids != text.ids
    (continued,) = read(tmp_path, prompts, json.dumps({"prompt": "Hi"}), continues=True)
    assert same(continued, prompts.of_text("Hi"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ('{"image": "a.png"}', "must be an object with prompt or messages"),
        ('{"prompt": "x", "messages": []}', "must be an object with prompt or messages"),
        ('{"prompt": 3}', "prompt must be a text, or give messages"),
        ('{"prompt": "x", "image": "none.png"}', "--image: cannot read .*none.png"),
        ('{"prompt": "x", "audio": "a.png"}', "--audio: no module of this model reads clips"),
        ('{"prompt": "<image><image>", "image": "a.png"}', "the message has 2 <image>, and 1 image given"),
        ('{"prompt": "x", "tools": [{}]}', "tools are not supported here"),
        ('{"messages": [{"role": "bot", "content": "x"}]}', "unknown role 'bot'. Use one of human, gpt, "),
        (
            '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}',
            "the last message is the assistant's",
        ),
        (
            '{"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}',
            "a message has tool_calls, for which our own",
        ),
        ('{"messages": []}', "messages must be a list of objects with role and content"),
        (
            '{"messages": [{"role": "user", "content": "<image>"}]}',
            "the messages have more places of images than files",
        ),
        (
            '{"messages": [{"role": "user", "content": "<image>"}], "images": ["a.png", "b.png"]}',
            "1 media have no place in the messages",
        ),
        (
            '{"messages": [{"role": "user", "content": [{"type": "picture"}]}]}',
            "content parts must have a type of text, image, .*, got 'picture'",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_line(line, message, prompts, tmp_path):
    with pytest.raises(UserError, match=f"--prompts: .*prompts.jsonl, line 3: {message}"):
        read(tmp_path, prompts, '{"prompt": "x"}', "", line)


def test_a_file_without_prompts_is_named(prompts, tmp_path):
    for lines, message in (([""], "has no prompts"), ([], "has no prompts")):
        with pytest.raises(UserError, match=message):
            read(tmp_path, prompts, *lines)
    with pytest.raises(UserError, match="--prompts: cannot read .*nothing.jsonl"):
        PromptFile(tmp_path / "nothing.jsonl")
