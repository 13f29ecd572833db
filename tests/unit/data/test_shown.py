"""Counts with their nouns, as messages have them."""

import pytest

from data.text_format import plural


@pytest.mark.parametrize(
    ("count", "noun", "said"),
    [
        (0, "shard", "0 shards"),
        (1, "shard", "1 shard"),
        (1234, "sample", "1,234 samples"),
        (2, "microbatch", "2 microbatches"),
        (2, "process", "2 processes"),
        (1, "process", "1 process"),
    ],
)
def test_a_count_and_its_noun_agree(count, noun, said):
    assert plural(count, noun) == said
