"""Lists in messages: the first of many, and how many more there are."""

from collections.abc import Sequence

SHOWN = 3
"""Most names in a message, unless its place says otherwise."""


def listed(names: Sequence[str], most: int = SHOWN, *, between: str = ", ", before_more: str = " ") -> str:
    """The first `most` of some names, and the number of the others."""
    more = f"{before_more}and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more
