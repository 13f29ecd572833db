"""A message names the first of many, and counts the others."""

from data.listed import listed


def test_the_first_are_named_and_the_others_counted():
    assert listed([]) == ""
    assert listed(["a", "b", "c"]) == "a, b, c"
    assert listed(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
    assert listed(["a", "b"], 1, between="\n", before_more="\n") == "a\nand 1 more"
