"""What chat templates write of tools and of other roles: nothing of a record is left out without a word."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, PaliGemmaProcessor, SiglipImageProcessor

from data.errors import DataError, RecordError
from data.records.conversation import Conversation, Part, Turn
from data.text.chat_renderer import CompiledTemplate
from data.text.placeholders import Placeholder
from data.text.tokens import build_tokenizer
from tests.media_tokens import item_of
from tests.unit.data.text.chat_templates import (
    CHATML,
    GEMMA,
    LLAMA,
    LLAVA,
    QWEN_VL,
    SCHEMA,
    TALKS,
    TOOLS,
    messages,
    parse,
    save_tokenizer,
    unmarked,
)

AS_TEXT = """{%- for m in messages -%}{{ m.role }}:{{ m.content or '' }}
{%- for call in m.tool_calls or [] -%}{{ call.function.name + ' ' + call.function.arguments }}{%- endfor %}
{% endfor -%}"""
STRICT = """{%- for m in messages -%}
{%- if m.role not in ['user', 'assistant'] -%}{{ raise_exception('only users and assistants') }}{%- endif -%}
{{ m.role }}:{{ m.content }}
{% endfor -%}"""
USER = {"role": "user", "content": "q"}


def call(arguments):
    return {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}],
    }


def given(template, message, has_tools=False):
    return CompiledTemplate(unmarked(template), {}).fit([USER, message], has_tools)[1]


def test_arguments_are_given_as_the_template_takes_them():
    for arguments in ({"a": 1}, '{"a": 1}'):
        (made,) = given(TOOLS, call(arguments))["tool_calls"]
        assert made["function"]["arguments"] == {"a": 1}
        (made,) = given(AS_TEXT, call(arguments))["tool_calls"]
        assert json.loads(made["function"]["arguments"]) == {"a": 1}
    (made,) = given(TOOLS, call("no object"))["tool_calls"]
    assert made["function"]["arguments"] == "no object"


@pytest.mark.parametrize(
    ("template", "message", "has_tools", "said"),
    [
        (CHATML, call({}), False, "leaves out the tool_calls"),
        (CHATML, {"role": "assistant", "content": "a"}, True, "leaves out the tools"),
        (TOOLS, {"role": "assistant", "content": "", "function_call": {"name": "f"}}, False, "the old form"),
        (TOOLS, {"role": "assistant", "tool_calls": [3]}, False, "not a list of objects"),
        ("{{ messages[-1].content }}", {"role": "tool", "content": "7"}, False, "messages of the role 'tool'"),
    ],
)
def test_what_a_template_leaves_out_is_an_error(template, message, has_tools, said):
    with pytest.raises(RecordError, match=said):
        given(template, message, has_tools)


@pytest.mark.parametrize(
    ("template", "role", "expected"),
    [
        (CHATML, "developer", "system"),
        (AS_TEXT, "developer", "developer"),
        (AS_TEXT, "function", "function"),
        (TOOLS, "developer", "system"),
        (TOOLS, "function", "tool"),
        (TOOLS, "tool", "tool"),
        (STRICT, "developer", "developer"),  # refused in the template's own words
    ],
)
def test_roles_are_those_that_the_template_knows(template, role, expected):
    assert given(template, {"role": role, "content": "x"})["role"] == expected


def test_the_choice_of_a_template(saved, tmp_path):
    record = parse(messages(TALKS["one turn"]))
    build = partial(build_tokenizer, saved(CHATML))
    own, plain = build(chat_template="own"), build_tokenizer(saved(CHATML, plain=True))
    assert own.template.encode(record, {}).tokens == plain.template.encode(record, {}).tokens
    assert own.shown(own.template.encode(record, {}).tokens).startswith("user:\nwhich")
    (tmp_path / "chat.jinja").write_text(unmarked(GEMMA))
    other = build(chat_template=str(tmp_path / "chat.jinja"), template_variables={"bos_token": "B"})
    assert other.shown(other.template.encode(record, {}).tokens).startswith("B<start_of_turn>user\n")
    named = saved(CHATML, chat_template={"default": unmarked(CHATML), "tool_use": unmarked(TOOLS)})
    several = build_tokenizer(named)
    assert several.template.encode(record, {}).tokens == build().template.encode(record, {}).tokens
    with_tools = parse({"messages": messages(TALKS["one turn"]), "tools": [SCHEMA]})
    assert "<tools>" in several.shown(several.template.encode(with_tools, {}).tokens)


def test_the_template_of_an_older_processor(tmp_path):
    saved = save_tokenizer(tmp_path, CHATML, plain=True)
    (saved / "chat_template.json").write_text(json.dumps({"chat_template": unmarked(QWEN_VL)}))
    assert build_tokenizer(saved, [Placeholder("<image>")]).template._renderer.written("image")
    (saved / "chat_template.json").write_text("{}")
    with pytest.raises(DataError, match=r"data\.tokenizer.*chat_template\.json has no chat_template"):
        build_tokenizer(saved)


def test_the_template_of_the_docs_writes_the_tokens_of_the_processor_of_paligemma(tmp_path):
    page = (Path(__file__).parents[4] / "docs" / "pretrained.md").read_text()
    (tmp_path / "chat.jinja").write_text(re.search(r"```jinja\n(.*?)```", page, re.S)[1])
    images = SiglipImageProcessor(size={"height": 14, "width": 14})
    images.image_seq_length = 4
    tokenizer = AutoTokenizer.from_pretrained(save_tokenizer(tmp_path / "in", LLAVA, plain=True))
    processor = PaliGemmaProcessor(images, tokenizer)
    processor.save_pretrained(tmp_path)
    ours = build_tokenizer(tmp_path, [Placeholder("<image>")], chat_template=str(tmp_path / "chat.jinja"))
    parts = (Part("image"), Part("image"), Part("text", "which digit?"))
    talk = Conversation((Turn("user", parts), Turn("assistant", (Part("text", "it is three"),))))
    pads = [ours.placeholder_id("<image>")] * 4
    encoded = ours.template.encode(talk, {"image": [[item_of(pads)]] * 2})
    item = np.zeros((14, 14, 3), dtype=np.uint8)
    theirs = processor(images=[[item] * 2], text=["<image><image>which digit?"], suffix=["it is three"])
    assert encoded.tokens == theirs["input_ids"][0]
    assert encoded.learned == [kind == 1 for kind in theirs["token_type_ids"][0]]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for %}", "cannot be compiled: line 1"),
        ("{{ 'always the same' }}", "does not write the words.*'always the same'"),
        ("{{ raise_exception('not today') }}", "an error.*not today"),
        ("{{ messages }}", "tried with a question and an answer.*before message 1"),
        (
            "{% generation %}{% endgeneration %}{% for m in messages %}{{ m.content }}{% endfor %}",
            "nothing of an answer",
        ),
        (
            "{% macro a(text) %}A: {% generation %}{{ text }}{% endgeneration %}{% endmacro %}"
            "{% for m in messages %}{{ a(m.content) }}{% endfor %}",
            "inside a macro",
        ),
        (None, "cannot read the file"),
    ],
)
def test_templates_that_cannot_be_used(source, words, saved, tmp_path):
    file = tmp_path / "chat.jinja"
    if source is not None:
        file.write_text(source)
    with pytest.raises(ValueError, match=rf"(?s)data\.chat_template: .*{words}"):
        build_tokenizer(saved(CHATML), chat_template=str(file))


def test_choices_that_contradict_each_other(saved):
    for name, options, words in (
        ("bytes", {"chat_template": "x.jinja"}, r"data\.chat_template.*`bytes` has our own format only"),
        ("bytes", {"template_variables": {"a": 1}}, r"data\.template_variables: \['a'\].*takes none"),
        (saved(CHATML), {"chat_template": "own", "template_variables": {"a": 1}}, r"data\.template_variables"),
        (saved(CHATML, plain=True), {"template_variables": {"a": 1}}, r"data\.template_variables.*has none"),
        (saved(CHATML, chat_template={"rag": "x", "tool_use": "y"}), {}, "rag, tool_use and none named 'default'"),
        ("bytes", {"placeholders": [Placeholder("<image>", mark="x")]}, "nothing writes 'x'"),
    ):
        with pytest.raises(DataError, match=words):
            build_tokenizer(name, **options)


def test_transformers_has_the_clock_of_today_and_renders_blocks_in_one_thread():
    """Else `CompiledTemplate` could call its public function."""
    from transformers.utils import chat_template_utils

    def render(template: str) -> str:
        messages = [{"role": "user", "content": "a"}]
        options = {"chat_template": template, "return_assistant_tokens_mask": True}
        return chat_template_utils.render_jinja_template([messages], **options)[0][0]

    assert render("{{ strftime_now('%Y') }}") >= "2025"
    blocks = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    template = chat_template_utils._compile_jinja_template(blocks)
    with template.environment.activate_tracker([], []), pytest.raises(ValueError, match="should not be reused"):
        render(blocks)


def test_the_day_is_not_today(saved):
    """A template with a clock gives the same tokens every day."""
    record = parse(messages(TALKS["one turn"]))
    tokenizer = build_tokenizer(saved(LLAMA))
    assert "Today: 26 Jul 2024\n" in tokenizer.shown(tokenizer.template.encode(record, {}).tokens)


def test_the_fingerprint_follows_all_that_tokens_follow_from(saved):
    build = partial(build_tokenizer, saved(LLAMA))
    first = build(["<image>"]).fingerprint
    assert build(["<image>"]).fingerprint == first
    others = [
        build(["<image>"], template_variables={"date_string": "x"}),
        build(["<image>"], chat_template="own"),
        build([Placeholder("<image>", start="S")]),
        build_tokenizer(saved(LLAMA, blocks=True), ["<image>"]),
        build_tokenizer(saved(CHATML), ["<image>"]),
        build_tokenizer("bytes"),
        build_tokenizer("bytes", ["<image>"]),
    ]
    assert len({first, *(tokenizer.fingerprint for tokenizer in others)}) == len(others) + 1


@pytest.mark.parametrize("blocks", [True, False])
def test_a_template_serves_threads(blocks, saved):
    tokenizer = build_tokenizer(saved(TOOLS, blocks=blocks))
    records = [
        parse(messages([("user", f"<|im_end|>{n}" * (n % 2)), ("assistant", "a" * (n % 7 + 1))])) for n in range(200)
    ]
    alone = [tokenizer.template.encode(record, {}) for record in records]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda record: tokenizer.template.encode(record, {}), records)) == alone


def test_names_of_tokens_for_people():
    tokenizer = build_tokenizer("bytes", ["<image>"])
    record = parse(messages([("user", "<image>é"), ("assistant", "3")]), image=1)
    encoded = tokenizer.template.encode(record, {"image": [[item_of([tokenizer.placeholder_id("<image>")] * 2)]]})
    assert tokenizer.shown([*encoded.tokens, 999]) == "[begin][user]<image><image>é[end][assistant]3[end][unused]"
    assert re.fullmatch(r"[0-9a-f]{32}", tokenizer.fingerprint)
