"""Text in messages: one printable line, counts with nouns, the first of many names, keys of samples."""

from collections.abc import Callable, Sequence

MOST_NAMES = 3


def shown(text: str) -> str:
    """Return the text with unprintable characters escaped, such as `\\x1b`, which affect terminals and logs."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode() for char in text
    )


def shown_lines(text: str) -> str:
    """Escape unprintable characters, but keep line breaks and tabs."""
    return "".join(char if char in "\n\t" else shown(char) for char in text)


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: 1 shard, 2 shards, 2 microbatches, 2 processes."""
    ending = "" if count == 1 else "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{count:,} {noun}{ending}"


def listed(names: Sequence[str], most: int = MOST_NAMES, *, between: str = ", ", before_more: str = " ") -> str:
    """Return the first `most` names and the number of the others."""
    more = f"{before_more}and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more


class SampleKey:
    """The key of a sample, looked up only when a message needs it."""

    def __init__(self, look_up: Callable[[], str]) -> None:
        self._look_up = look_up

    def __str__(self) -> str:
        return self._look_up()

    def __repr__(self) -> str:
        return repr(str(self))


Key = str | SampleKey
