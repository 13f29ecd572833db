"""Patterns of PEFT that name layers mean what they mean in Python, and end, however they are made."""

import re

import pytest

from mimo_train.config.pretrained.layer_patterns import LONGEST, fits

NAMES = ("model.layers.0.self_attn.q_proj", "model.layers.12.mlp.up_proj", "q_proj", "lm_head", "a.b", "aab", "")
PATTERNS = (
    "q_proj",
    r"layers\.0\.self_attn\.q_proj",
    "^model.layers.0.self_attn.q_proj",
    r"model\.layers\.\d+\..*",
    r".*\.(q|k|v)_proj$",
    r"layers\.(?:0|12)\.(mlp|self_attn)\.[a-z_]+",
    r"[^.]+\.b|a{2}b|a{1,}?b|(a{0,1}){3}b|a+?a*b",
    r"\w*_(head|proj)",
    "(up|q)?_proj|",
    "[]a.]*b",
    "_proj",
    "a{3}b|a{,1}",
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_means_what_it_means_in_python(pattern):
    wanted = [name for name in NAMES if re.match(rf"(.*\.)?({pattern})$", name)]
    assert [name for name in NAMES if fits(pattern, name)] == wanted


def test_patterns_fit_some_names():
    assert sum(fits(pattern, name) for pattern in PATTERNS for name in NAMES) > len(PATTERNS)


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+b", "(.*)*b", "(a|a)*b", "(a|aa)+b", ".*.*.*.*.*.*.*.*.*.*b", "(a?){300}a{300}b", "((a*)*)*" * 20 + "b"],
)
def test_no_pattern_goes_back_over_a_name_for_ever(pattern):
    """Python's own matching of these would take longer than anybody waits."""
    assert not fits(pattern, "a" * 300)
    assert fits(pattern, "a" * 300 + "b")


@pytest.mark.parametrize(
    "pattern",
    ["(" * 300 + "a" + ")*" * 300, "(", ")", "a)", "(?=a)", r"(a)\1", "(?P<n>a)", "*", "a**", "a{x}", "[a", r"\b",
     "a{2,1}", "a" * (LONGEST + 1)],
)  # fmt: skip
def test_what_is_not_understood_or_has_no_end_is_an_error(pattern):
    with pytest.raises((ValueError, RecursionError)):
        fits(pattern, "a" * 300)
