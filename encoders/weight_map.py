"""Maps parameters of a model to the tensors of a directory in the format of `transformers`, in both directions.

A rule lists the tensor rows that make up one of our parameters. A row is an entry of the first dimension, so a rule
holds for weights and biases alike. Tensor parallelism cuts ranges of rows or of columns, so each rank can read its part
alone.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

Spelling = str | tuple[tuple[str, str], ...]
"""The prefix of all names in a directory, or pairs (prefix in the map, prefix there) of which the first match
applies."""


@dataclass(frozen=True)
class Rows:
    """Rows of a tensor of the directory."""

    name: str
    """Name of the tensor; empty: the directory does not have the rows, which are zeros or drawn."""
    count: int
    first: int = 0
    tail: tuple[int, ...] = ()
    """Other dimensions of the tensor, if ours is flattened: of the kernel of a convolution over patches."""
    std: float = 0.0
    """Standard deviation of rows that the directory does not have; 0: zeros."""
    stack: tuple[int, ...] = ()
    """Shape (matrices, rows, columns) of a tensor that stacks matrices, whose rows are numbered consecutively, or
    (vectors, numbers). A directory may have matrices transposed: (matrices, columns, rows)."""
    step: int = 1
    """Distance of one row from the next: 2 for every second row."""


@dataclass(frozen=True)
class Rule:
    """The rows that make up one parameter."""

    ours: str
    """Name of the parameter in its module, as in a single process."""
    rows: tuple[Rows, ...]
    """Rows in order; together they are the whole parameter. Those of a stack of matrices are numbered
    consecutively if they have a `tail`."""
    fp32: bool = False
    """True if directories keep it in fp32 whatever the dtype of their weights."""


@dataclass(frozen=True)
class WeightMap:
    """The rules of all parameters of a part of a model."""

    rules: tuple[Rule, ...]
    carried: tuple[str, ...] = ()
    """Shell patterns of tensors that no parameter needs, and that an export copies from the directory. Names are as in
    the map, or as in the directory."""
    sinusoids: tuple[str, ...] = ()
    """Carried position tensors that are computed here as in Whisper; a directory with other values is rejected."""
    copies: tuple[tuple[str, str], ...] = ()
    """Tensors that a directory may have as a copy of another: (copy, the other), by names of the map. No parameter uses
    a copy, and an export omits it."""
    dropped: tuple[str, ...] = ()
    """Tensors that a directory may have and that the model does not use, by names of the map. An export omits them."""
    prefixes: tuple[Spelling, ...] = ("",)
    """Possible spellings of the names, by the class and version of `transformers` that saved the directory. An export
    writes the first."""
    transposed: bool = False
    """True if any directory has the matrices of stacks transposed; False: their shapes tell."""
    is_renamed: bool = False
    """True if version 5 of `transformers` has other names in memory, so that adapters of PEFT cannot use the map's."""

    def __post_init__(self) -> None:
        ours = Counter(rule.ours for rule in self.rules)
        assert max(ours.values(), default=1) == 1, ours.most_common(1)

    def under(self, *prefixes: Spelling) -> "WeightMap":
        """Return this map for a model that has the part under other names."""
        return replace(self, prefixes=prefixes)

    def named(self, before: str) -> "WeightMap":
        """Return this map with `before` as a prefix of our names."""
        return replace(self, rules=tuple(replace(rule, ours=before + rule.ours) for rule in self.rules))

    def __add__(self, other: "WeightMap") -> "WeightMap":
        """Return the union of two maps under the same prefixes."""
        assert self.prefixes == other.prefixes
        return replace(
            self,
            rules=self.rules + other.rules,
            carried=self.carried + other.carried,
            sinusoids=self.sinusoids + other.sinusoids,
            copies=self.copies + other.copies,
            dropped=self.dropped + other.dropped,
        )

    def stacks(self) -> dict[str, tuple[int, ...]]:
        """Return {tensor of the directory: `Rows.stack`} for all stacks of matrices."""
        return {rows.name: rows.stack for rule in self.rules for rows in rule.rows if rows.stack}

    def row_counts(self) -> dict[str, int]:
        """Return {tensor of the directory: its rows} for all tensors in the rules, a stack with those of its matrices.
        Raise AssertionError if a row of a tensor is missing or used twice."""
        places: dict[str, dict[tuple[int, int, int], list[int]]] = {}
        for rule in self.rules:
            for rows in rule.rows:
                if rows.name:
                    offset = rows.first % rows.step
                    first = rows.first - offset
                    ranges = places.setdefault(rows.name, {})
                    ranges.setdefault((first, first + rows.count * rows.step, rows.step), []).append(offset)
        counts = {}
        for name, ranges in places.items():
            end = 0
            for (first, last, step), offsets in sorted(ranges.items()):
                assert first == end and sorted(offsets) == [*range(step)], f"rows {end} to {first} of {name}"
                end = last
            counts[name] = end
        return counts


def stored_stack(stack: tuple[int, ...], transposed: bool) -> tuple[int, ...]:
    """Return the shape of a stack of matrices or vectors in a directory."""
    return (stack[0], stack[2], stack[1]) if transposed and len(stack) == 3 else stack


def spelt(name: str, spelling: Spelling) -> str:
    """Return a name of the map as a directory spells it."""
    if isinstance(spelling, str):
        return spelling + name
    for before, after in spelling:
        if name.startswith(before):
            return after + name[len(before) :]
    raise AssertionError(f"no spelling of {name}")


def same(ours: str, theirs: str, rows: int, tail: tuple[int, ...] = ()) -> Rule:
    """Return the rule of a parameter that equals a tensor, except for the shape of a row."""
    return Rule(ours, (Rows(theirs, rows, tail=tail),))


def stacked(ours: str, theirs: Iterable[tuple[str, int]]) -> Rule:
    """Return the rule of a parameter that concatenates tensors (name, rows)."""
    return Rule(ours, tuple(Rows(name, rows) for name, rows in theirs))


def heads(
    ours: str,
    query: str,
    key: str,
    value: str,
    *,
    groups: int,
    per_group: int,
    size: int,
    firsts: tuple[int, ...] = (),
    gates: bool = False,
) -> Rule:
    """Return the rule of a qkv parameter in Megatron-Core's order: for each key head its queries, its key, its value.

    Args:
        groups: key heads.
        per_group: query heads of each.
        size: size of a head.
        firsts: first rows of queries, keys and values in one tensor; default: three tensors.
        gates: True if the tensor of queries has a gate behind each query head; ours has them behind all queries of a
            key head.
    """
    begins = firsts or (0, 0, 0)
    rows = []
    for group in range(groups):
        if gates:
            heads_of_group = range(group * per_group, (group + 1) * per_group)
            rows += [Rows(query, size, (2 * head + gate) * size) for gate in (0, 1) for head in heads_of_group]
            rows += [Rows(name, size, group * size) for name in (key, value)]
            continue
        for name, begin, count in zip((query, key, value), begins, (per_group * size, size, size), strict=True):
            rows.append(Rows(name, count, begin + group * count))
    return Rule(ours, tuple(rows))


def with_biases(weights: Iterable[Rule]) -> Iterator[Rule]:
    """Yield the rules of linear layers' weights, each followed by that of its bias (names end in `bias`, not
    `weight`)."""
    for rule in weights:
        yield rule
        rows = tuple(replace(rows, name=_bias(rows.name), tail=()) for rows in rule.rows)
        yield Rule(_bias(rule.ours), rows)


def _bias(name: str) -> str:
    return name.removesuffix("weight") + "bias" if name else name
