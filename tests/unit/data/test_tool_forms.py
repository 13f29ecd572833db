"""What chat templates write of tools and of other roles: nothing of a record is left out without a word."""

import json

import pytest

from data.errors import RecordError
from data.text.chat_renderer import CompiledTemplate, ToolForms
from tests.unit.data.chat_templates import CHATML, TOOLS, unmarked

AS_TEXT = """{%- for m in messages -%}{{ m.role }}:{{ m.content or '' }}
{%- for call in m.tool_calls or [] -%}{{ call.function.name + ' ' + call.function.arguments }}{%- endfor %}
{% endfor -%}"""
STRICT = """{%- for m in messages -%}
{%- if m.role not in ['user', 'assistant'] -%}{{ raise_exception('only users and assistants') }}{%- endif -%}
{{ m.role }}:{{ m.content }}
{% endfor -%}"""
USER = {"role": "user", "content": "q"}


def forms(template) -> ToolForms:
    return ToolForms(CompiledTemplate(unmarked(template), {}).render)


def call(arguments):
    return {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}],
    }


def given(template, message, has_tools=False):
    return forms(template).fit([USER, message], has_tools)[1]


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
