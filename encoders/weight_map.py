"""How the parameters of a model are made of the tensors of a directory that `transformers` saves, as data that is read
both ways.

A rule says of which rows of which tensors one of our parameters consists. A row is an entry of the first dimension, so
that a rule holds for weights and biases alike. Tensor parallelism cuts ranges of rows or of columns, so that each rank
can read its part alone.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

Spelling = str | tuple[tuple[str, str], ...]
"""How names are spelt in a directory: what is in front of all of them, or (beginning in the map, beginning there) of
which the first that fits applies."""


@dataclass(frozen=True)
class Rows:
    """Rows of a tensor of the directory."""

    name: str
    """Of the tensor; empty: the directory does not have them, they are zeros or drawn."""
    count: int
    first: int = 0
    tail: tuple[int, ...] = ()
    """Other dimensions of the tensor, where ours has their product: of the kernel of a convolution over patches."""
    std: float = 0.0
    """Standard deviation of rows that the directory does not have; 0: zeros."""


@dataclass(frozen=True)
class Rule:
    """What one parameter consists of."""

    ours: str
    """Name of the parameter in its module, as at one process."""
    rows: tuple[Rows, ...]
    """One after the other, they are the whole parameter."""


@dataclass(frozen=True)
class WeightMap:
    """All parameters of a part of a model."""

    rules: tuple[Rule, ...]
    carried: tuple[str, ...] = ()
    """Shell patterns of tensors that no parameter is made of, and that an export copies from the directory; of names as
    in the map, or as in the directory."""
    sinusoids: tuple[str, ...] = ()
    """Of these, positions that are computed here as Whisper has them: a directory with others is refused."""
    copies: tuple[tuple[str, str], ...] = ()
    """Tensors that a directory may have as a copy of another: (copy, the other), by names of the map. No parameter is
    made of a copy, and an export leaves it out."""
    prefixes: tuple[Spelling, ...] = ("",)
    """How a directory may spell the names: it depends on the class and the version of `transformers` that saved it. The
    first is the one that is written."""
    is_renamed: bool = False
    """True if version 5 of `transformers` has other names in memory, so that adapters of PEFT cannot use the map's."""

    def __post_init__(self) -> None:
        ours = Counter(rule.ours for rule in self.rules)
        assert max(ours.values(), default=1) == 1, ours.most_common(1)

    def under(self, *prefixes: Spelling) -> "WeightMap":
        """This map in a model that has the part under other names."""
        return replace(self, prefixes=prefixes)

    def named(self, before: str) -> "WeightMap":
        """This map with `before` in front of our names."""
        return replace(self, rules=tuple(replace(rule, ours=before + rule.ours) for rule in self.rules))

    def __add__(self, other: "WeightMap") -> "WeightMap":
        """Both, of parts under the same prefixes."""
        assert self.prefixes == other.prefixes
        return replace(
            self,
            rules=self.rules + other.rules,
            carried=self.carried + other.carried,
            sinusoids=self.sinusoids + other.sinusoids,
            copies=self.copies + other.copies,
        )

    def row_counts(self) -> dict[str, int]:
        """Rows of every tensor of the directory that the rules name.

        Raises:
            AssertionError: of a tensor a row is missing, or has two places.
        """
        places: dict[str, list[tuple[int, int]]] = {}
        for rule in self.rules:
            for rows in rule.rows:
                if rows.name:
                    places.setdefault(rows.name, []).append((rows.first, rows.first + rows.count))
        counts = {}
        for name, ranges in places.items():
            end = 0
            for first, last in sorted(ranges):
                assert first == end, f"rows {end} to {first} of {name}"
                end = last
            counts[name] = end
        return counts


def spelt(name: str, spelling: Spelling) -> str:
    """A name of the map as a directory has it."""
    if isinstance(spelling, str):
        return spelling + name
    for before, there in spelling:
        if name.startswith(before):
            return there + name[len(before) :]
    raise AssertionError(f"no spelling of {name}")


def same(ours: str, theirs: str, rows: int, tail: tuple[int, ...] = ()) -> Rule:
    """A parameter that is a tensor as it is, but perhaps for the shape of a row."""
    return Rule(ours, (Rows(theirs, rows, tail=tail),))


def stacked(ours: str, theirs: Iterable[tuple[str, int]]) -> Rule:
    """Several tensors (name, rows), one after the other."""
    return Rule(ours, tuple(Rows(name, rows) for name, rows in theirs))


def heads(
    ours: str, query: str, key: str, value: str, *, groups: int, per_group: int, size: int, firsts: tuple[int, ...] = ()
) -> Rule:
    """Queries, keys and values in Megatron-Core's order: for each key head its queries, its key, its value.

    Args:
        groups: key heads.
        per_group: query heads of each.
        size: of a head.
        firsts: row at which queries, keys and values begin, where they are in one tensor; default: 0 of three tensors.
    """
    begins = firsts or (0, 0, 0)
    rows = []
    for group in range(groups):
        for name, begin, count in zip((query, key, value), begins, (per_group * size, size, size), strict=True):
            rows.append(Rows(name, count, begin + group * count))
    return Rule(ours, tuple(rows))


def with_biases(weights: Iterable[Rule]) -> Iterator[Rule]:
    """The rules of linear layers' weights, each followed by that of the bias: names end in `bias` instead of
    `weight`."""
    for rule in weights:
        yield rule
        rows = tuple(replace(rows, name=_bias(rows.name), tail=()) for rows in rule.rows)
        yield Rule(_bias(rule.ours), rows)


def _bias(name: str) -> str:
    return name.removesuffix("weight") + "bias" if name else name
