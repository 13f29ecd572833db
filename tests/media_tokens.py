"""The text of media in tests: placeholders alone."""

from collections.abc import Sequence

from data.text.placeholders import ItemText


def item_of(tokens: Sequence[int]) -> tuple[int, ItemText]:
    """Return an item of `MediaTokens` whose placeholder is the first token."""
    return tokens[0], ItemText("", tokens, "")
