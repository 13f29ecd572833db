"""Parameters of this rank from the tensors of a directory: only the ranges that the rank holds are read."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod

import torch

from data.listed import listed
from data.shown import plural
from encoders.normal import fill
from encoders.weight_map import Rows, Rule, Spelling, WeightMap, spelt
from encoders.whisper.positions import sinusoids
from mimo_train.checkpoint.hf.tensors import TensorFolder
from mimo_train.config.fault import UserError
from mimo_train.model.seeds import seed_for

SINUSOID_ERROR = 0.01
"""Largest difference of positions that were saved in bf16, and more."""
SHOWN = 5
"""Most tensors that a message names."""


@dataclass(frozen=True)
class Cut:
    """What tensor parallelism leaves of a parameter on one rank."""

    dim: int | None = None
    """That is cut; None: nothing."""
    stride: int = 1
    """Equal sections of it, each of which is cut."""
    rank: int = 0
    ranks: int = 1

    def ranges(self, rows: int) -> list[tuple[int, int]]:
        """(first, last) of this rank's rows of a whole parameter with so many, in its order."""
        if self.dim != 0:
            return [(0, rows)]
        section = rows // self.stride
        part = section // self.ranks
        return [(at * section + self.rank * part, at * section + (self.rank + 1) * part) for at in range(self.stride)]

    def columns(self, width: int) -> tuple[int, int] | None:
        """First and last of this rank's columns of a whole parameter with `width` columns; None: all."""
        if self.dim != 1:
            return None
        return self.rank * width // self.ranks, (self.rank + 1) * width // self.ranks


class Reader:
    """Reads a part of a model from a directory.

    Raises:
        UserError: the directory lacks tensors, has others than the part has, or of other shapes.
    """

    def __init__(self, folder: TensorFolder, of: WeightMap, key: str, seed: int = 0):
        """
        Args:
            key: config key of the part, for errors.
            seed: of rows that the directory does not have.
        """
        self._folder, self._key, self._seed = folder, key, seed
        self._rules = {rule.ours: rule for rule in of.rules}
        self._counts = of.row_counts()
        self._written, self._found = of.prefixes[0], self._spelling(of)
        spelling = self._found
        self._theirs = {name: spelt(name, spelling) for name in self._counts}
        self._carried = [*of.carried]
        if isinstance(spelling, str):
            self._carried += [spelt(pattern, spelling) for pattern in of.carried]
        self._require_tensors()
        for name in of.sinusoids:
            self._require_sinusoids(spelt(name, spelling))

    @property
    def spelling(self) -> Spelling:
        """How the directory spells the names of the map."""
        return self._found

    @property
    def begins(self) -> tuple[str, ...]:
        """What the names of this part, and of nothing else in a directory of several parts, begin with there."""
        if self._found and isinstance(self._found, str):
            return (self._found,)
        return tuple({spelt(f"{name.partition('.')[0]}.", self._found): None for name in self._counts})

    @property
    def read_names(self) -> set[str]:
        """Tensors of the directory that parameters are made of."""
        return set(self._theirs.values())

    def uses(self, name: str) -> bool:
        """Whether a tensor of the directory belongs to this part: a parameter is made of it, or it is carried along."""
        return name in self.read_names or any(fnmatchcase(name, pattern) for pattern in self._carried)

    def written_name(self, name: str) -> str:
        """The name by which a tensor that is carried along is written: spelt as the others are."""
        found, written = self._found, self._written
        if not isinstance(found, str) or not isinstance(written, str):
            return name
        return written + name.removeprefix(found) if name.startswith(found) and self.uses(name) else name

    def fill(self, parameters: Mapping[str, torch.Tensor], cuts: Mapping[str, Cut]) -> None:
        """Write the values of parameters of this rank, by their names in the map, in place.

        Args:
            parameters: shape of each: this rank's part of it.
            cuts: how each is cut.

        Raises:
            UserError: a parameter is not in the map, or has another shape than the directory's tensors give.
        """
        unknown = [name for name in parameters if name not in self._rules]
        if unknown:
            raise UserError(
                f"{self._key}: {self._folder.folder} has no tensor for {listed(unknown, SHOWN)}: the model has "
                "parameters that its family has not; remove the keys that add them"
            )
        wrong = [said for name, value in parameters.items() if (said := self._mismatch(name, value, cuts[name]))]
        if wrong:
            raise UserError(f"{self._key}: {self._folder.folder} does not fit the model: {'; '.join(wrong[:SHOWN])}")
        with torch.no_grad():
            for name, value in parameters.items():
                self._fill(value, self._rules[name], cuts[name])

    def _fill(self, parameter: torch.Tensor, rule: Rule, cut: Cut) -> None:
        local = parameter.data.view(len(parameter), -1)
        whole = local.size(1) * (cut.ranks if cut.dim == 1 else 1)
        at = 0
        for rows in _pieces(rule, cut):
            parts: Iterator[torch.Tensor] = iter([self._new_rows(rule, rows, whole, cut)])
            if rows.name:
                parts = self._folder.rows(self._theirs[rows.name], rows.first, rows.count, cut.columns(whole))
            for part in parts:
                local[at : at + len(part)] = part.to(device=local.device, dtype=local.dtype)
                at += len(part)
        assert at == len(local), rule.ours

    def _new_rows(self, rule: Rule, rows: Rows, width: int, cut: Cut) -> torch.Tensor:
        """Rows that the directory does not have: the same at every layout."""
        if not rows.std or rows.name:
            return torch.zeros(rows.count, 1)
        first, last = cut.columns(width) or (0, width)
        drawn = torch.empty(rows.count, last - first)
        fill(drawn, rows.std, seed_for(self._seed, "new rows", rule.ours), rows.first, first)
        return drawn

    def _mismatch(self, name: str, parameter: torch.Tensor, cut: Cut) -> str:
        """What is wrong with the shape of a parameter; empty if nothing is."""
        rule = self._rules[name]
        rows = sum(last - first for first, last in cut.ranges(sum(rows.count for rows in rule.rows)))
        named = next(rows.name for rows in rule.rows if rows.name)
        stored = self._shape(named)
        columns = cut.columns(prod(stored[1:]))
        width = prod(stored[1:]) if columns is None else columns[1] - columns[0]
        if (len(parameter), parameter.numel() // len(parameter)) == (rows, width):
            return ""
        there = " and ".join(dict.fromkeys(f"{rows.name} {self._shape(rows.name)}" for rows in rule.rows if rows.name))
        here = f"{tuple(parameter.shape)}" + (f" on each of {cut.ranks} ranks" if cut.ranks > 1 else "")
        return f"{there} there make {rows} x {width}, {name} here is {here}"

    def _spelling(self, of: WeightMap) -> Spelling:
        first = next(iter(self._counts))
        for spelling in of.prefixes:
            if spelt(first, spelling) in self._folder.tensors:
                return spelling
        tried = " or ".join(spelt(first, spelling) for spelling in of.prefixes)
        there = listed(list(self._folder.tensors), SHOWN)
        raise UserError(f"{self._key}: {self._folder.folder} has no tensor {tried}; it has {there}")

    def _require_tensors(self) -> None:
        there = self._folder.tensors
        missing = [theirs for theirs in self._theirs.values() if theirs not in there]
        found = [
            f"{theirs} has shape {there[theirs].shape} there, and {plural(self._counts[name], 'row')} here"
            for name, theirs in self._theirs.items()
            if theirs in there and there[theirs].shape[:1] != (self._counts[name],)
        ][:SHOWN]
        if missing:
            found.insert(0, f"it lacks {listed(missing, SHOWN)}")
        if found:
            raise UserError(f"{self._key}: {self._folder.folder} does not fit the model: {'; '.join(found)}")

    def _require_sinusoids(self, name: str) -> None:
        if name not in self._folder.tensors:
            return
        there = self._folder.whole(name).float()
        length, width = there.shape
        if float((there - sinusoids(length, width, there.device)).abs().max()) > SINUSOID_ERROR:
            raise UserError(
                f"{self._key}: {name} of {self._folder.folder} are no sinusoids, and positions are computed here: no "
                "encoder of this family"
            )

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._folder.tensors[self._theirs[name]].shape


def require_all_used(
    folder: TensorFolder,
    readers: Iterable[Reader],
    key: str,
    carried: Iterable[str] = (),
    begins: tuple[str, ...] = ("",),
) -> None:
    """
    Args:
        carried: shell patterns of tensors that no part reads.
        begins: what the names of the tensors begin with that are looked at.

    Raises:
        UserError: a directory has tensors that no part of the model uses: it would not be the model that was saved.
    """
    readers, carried = list(readers), list(carried)
    unexpected = [
        name
        for name in folder.tensors
        if name.startswith(begins)
        and not any(reader.uses(name) for reader in readers)
        and not any(fnmatchcase(name, one) for one in carried)
    ]
    if unexpected:
        raise UserError(
            f"{key}: {folder.folder} has {listed(unexpected, SHOWN)}, for which the model has no place: it would not "
            "be the model that was saved"
        )


def _pieces(rule: Rule, cut: Cut) -> Iterator[Rows]:
    """The rows of this rank's part of a parameter."""
    for first, last in cut.ranges(sum(rows.count for rows in rule.rows)):
        at = 0
        for rows in rule.rows:
            begin, end = max(first, at), min(last, at + rows.count)
            if begin < end:
                yield replace(rows, count=end - begin, first=rows.first + begin - at)
            at += rows.count
