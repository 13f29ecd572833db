"""A chat template of whoever made the tokenizer: a rendering ends, also where it was written not to."""

import pytest

from data import jinja_bounds
from data.chat_jinja import ChatJinja
from data.chat_renderer import ChatRenderer
from data.errors import DataError, RecordError
from data.jinja_bounds import EndlessTemplate

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' ~ message['content'] ~ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LOOPS = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
ENDLESS = {
    "loops": LOOPS,
    "a loop that calls itself": "{% for a in [0, 1] recursive %}{{ loop([0, 1]) if loop.depth < 99 }}{% endfor %}",
    "long loops that call themselves": (
        "{% for a in range(90000) recursive %}{{ loop(range(90000)) if loop.depth < 9 }}{% endfor %}"
    ),
    "macros that call themselves": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}"
    ),
    "a text that doubles": (
        "{% set n = namespace(x='ab') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
    ),
    "a sum that doubles": (
        "{% set n = namespace(x='ab') %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}"
    ),
    "a list that doubles": (
        "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}"
    ),
    "a join that grows": (
        "{% set n = namespace(x='ab') %}{% for a in range(60) %}{% set n.x = [n.x, n.x, n.x]|join %}{% endfor %}"
    ),
    "a method that grows": (
        "{% set n = namespace(x='ab') %}{% for a in range(60) %}{% set n.x = n.x.join([n.x] * 99) %}{% endfor %}"
    ),
    "a filter over filters": "{% for a in range(90000) %}{{ range(90000)|map('string')|list|length }}{% endfor %}",
    "text in loops": "{% for a in range(90000) %}" + "words " * 9000 + "{% endfor %}",
    "a constant in loops": "{% for a in range(90000) %}{{ '" + "words " * 9000 + "' }}{% endfor %}",
    "slices": "{% for a in range(90000) %}{% set b = messages[0].role[:] * 99999 %}{{ b[1:] }}{% endfor %}",
    "copies": "{{ 'a' * 9000000000 }}",
    "copies of a list": "{{ [1] * 9000000000 }}",
    "a power": "{{ 9 ** 999999999 }}",
    "products": "{% set n = namespace(x=9) %}{% for a in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "a wide filter": "{{ 'a'|center(9000000000) }}",
    "wide JSON": "{{ [1]|tojson(indent=9000000000) }}",
    "many parts": "{{ [1]|batch(9000000000, 0)|list }}",
    "a wide method": "{{ 'a'.ljust(9000000000) }}",
    "a wide format": "{{ '%9000000000d' % 1 }}",
    "a wide format of a method": "{{ '{:9000000000}'.format(1) }}",
    "a width as an argument": "{{ '{:{}}'.format(1, 9000000000) }}",
    "a wide filter of formats": "{{ '%*d'|format(9000000000, 1) }}",
    "replacements": "{% set a = 'a' * 900000 %}{{ a.replace('a', a) }}",
    "a filter of replacements": "{% set a = 'a' * 900000 %}{{ a|replace('a', a) }}",
}
MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("name", ENDLESS)
def test_a_rendering_ends(name, monkeypatch):
    monkeypatch.setattr(jinja_bounds, "WORK", 20_000)
    template = ChatJinja(ENDLESS[name])
    for render in (template.render, template.render_spans):
        with pytest.raises(EndlessTemplate, match="^the template is given up: "):
            render(MESSAGES, None, {})


def test_a_template_of_a_tokenizer_is_refused_and_one_that_a_record_makes_endless_spoils_that_record(monkeypatch):
    monkeypatch.setattr(jinja_bounds, "WORK", 20_000)
    with pytest.raises(
        DataError, match="^data.chat_template: the folder: the template is given up: .*another template"
    ):
        ChatRenderer({"default": LOOPS + CHATML}, {}, "the folder")
    renderer = ChatRenderer(
        {"default": "{% if 'forge' in messages[0].content %}" + LOOPS + "{% endif %}" + CHATML}, {}, "the folder"
    )
    for _ in range(3):
        with pytest.raises(RecordError, match="loops and calls do not end within 20,000 turns"):
            renderer.render("default", [{"role": "user", "content": "forge"}], None)
        assert renderer.render("default", MESSAGES, None) == "<|im_start|>user\na<|im_end|>\n"


def test_long_conversations_are_rendered():
    """Thousands of turns, or megabytes in one."""
    template = ChatJinja(CHATML)
    for turns, words in ((5000, "words"), (2, "words " * 10**6)):
        messages = [{"role": "user", "content": words}] * turns
        text = f"<|im_start|>user\n{words}<|im_end|>\n" * turns
        assert (template.render(messages, None, {}) == text) is True  # pytest would show how megabytes differ


def test_blocks_that_python_cannot_nest_are_no_template():
    with pytest.raises(DataError, match="the template of the folder is no Jinja: line "):
        ChatRenderer({"default": "{% for a in b %}" * 30 + "{% endfor %}" * 30}, {}, "the folder")
