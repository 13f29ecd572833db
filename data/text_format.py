"""Texts from outside as people may see them: a terminal obeys control characters, and logs break at line ends."""


def shown(text: str) -> str:
    """The text in one line, with every character that cannot be printed written as Python writes it, such as
    `\\x1b`."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape", "surrogatepass").decode() for one in text)


def shown_lines(text: str) -> str:
    """`shown`, but lines stay lines and tabs tabs."""
    return "".join(one if one in "\n\t" else shown(one) for one in text)


def plural(count: int, noun: str) -> str:
    """A count with its noun: 1 shard, 2 shards, 2 microbatches, 2 processes."""
    ending = "" if count == 1 else "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{count:,} {noun}{ending}"
