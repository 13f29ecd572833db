"""Counts with nouns and lists of names, as messages have them."""

import pytest

from data.text_format import listed, plural


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "shard", "0 shards"),
        (1, "shard", "1 shard"),
        (1234, "sample", "1,234 samples"),
        (2, "microbatch", "2 microbatches"),
        (2, "process", "2 processes"),
        (1, "process", "1 process"),
    ],
)
def test_count_and_noun_agree(count, noun, text):
    assert plural(count, noun) == text


def test_first_names_are_listed_and_the_others_counted():
    assert listed([]) == ""
    assert listed(["a", "b", "c"]) == "a, b, c"
    assert listed(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
    assert listed(["a", "b"], 1, between="\n", before_more="\n") == "a\nand 1 more"
