"""Kinds of ranks: those that run the same code on tensors of the same sizes. Imports no torch."""

from dataclasses import dataclass

from mimo_train.config.errors import UserError
from mimo_train.layout.ranks import RunLayout

ALL_KINDS = "all-kinds"


@dataclass(frozen=True)
class Kind:
    """A rank, and how many are like it."""

    rank: int
    """The one that is run."""
    name: str
    """Its modules and their stages."""
    number: int
    """Of ranks."""


def kinds_of(layout: RunLayout) -> list[Kind]:
    """A rank for each combination of modules and their stages, the lowest; that of the language model's last stage
    writes the log too."""
    first: dict[str, int] = {}
    number: dict[str, int] = {}
    for rank in range(layout.world_size):
        name = layout.kind_of(rank)
        first.setdefault(name, rank)
        number[name] = number.get(name, 0) + 1
    return [Kind(rank, name, number[name]) for name, rank in first.items()]


def chosen(layout: RunLayout, ranks: str) -> list[Kind]:
    """The kinds that `--ranks` asks for: `all-kinds`, or ranks with commas between them.

    Raises:
        UserError: it is neither, or there is no such rank.
    """
    every = kinds_of(layout)
    if ranks == ALL_KINDS:
        return every
    numbers = {kind.name: kind.number for kind in every}
    found = []
    for text in ranks.split(","):
        if not text.strip().isdecimal() or int(text) >= layout.world_size:
            raise UserError(f"--ranks: {text!r} is not one of the ranks 0 to {layout.world_size - 1}, nor {ALL_KINDS}")
        rank = int(text)
        found.append(Kind(rank, layout.kind_of(rank), numbers[layout.kind_of(rank)]))
    return found
