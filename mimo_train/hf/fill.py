"""Fill this rank's parameters from a directory, reading only the ranges that the rank holds."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod

import torch

from data.text_format import listed
from encoders.initial_weights import fill
from encoders.native.whisper.model import sinusoids
from encoders.weight_map import Rows, Rule, WeightMap, spelt
from mimo_train.config.errors import UserError
from mimo_train.hf.matching import SHOWN, MatchedPart
from mimo_train.hf.tensors import TensorFolder
from mimo_train.models.parameters import Cut, seed_for

SINUSOID_ERROR = 0.01
"""Largest error of positions that were saved in bf16, with a margin."""


class Reader(MatchedPart):
    """Reads a part of a model from a directory.

    Raises:
        UserError: the directory lacks tensors, or has others or other shapes than the part.
    """

    def __init__(self, folder: TensorFolder, of: WeightMap, key: str, seed: int = 0):
        """Match a part with the tensors of a directory.

        Args:
            key: config key of the part, for errors.
            seed: seed of rows that the directory lacks.
        """
        super().__init__(folder.folder, folder.tensors, of, key)
        self._source, self._seed = folder, seed
        self._rules = {rule.ours: rule for rule in of.rules}
        for name in of.sinusoids:
            self._require_sinusoids(spelt(name, self.spelling))

    def require_equal_copies(self) -> None:
        """Require that tied tensors are equal. Raises UserError if a tensor differs from the one that it must copy."""
        for copy, other in self.copies.items():
            rows = self.tensors[copy].shape[0]
            pairs = zip(self._source.rows(copy, 0, rows), self._source.rows(other, 0, rows), strict=True)
            if not all(torch.equal(*pair) for pair in pairs):
                raise UserError(
                    f"{self._key}: {self.folder} has {copy} and {other} with different values, but config.json ties "
                    "them (tie_word_embeddings): set tie_word_embeddings to false there, or copy the directory again"
                )

    def fill(self, parameters: Mapping[str, torch.Tensor], cuts: Mapping[str, Cut]) -> None:
        """Write this rank's values into parameters in place.

        Args:
            parameters: this rank's part of each, by name in the map.
            cuts: how each is cut.

        Raises:
            UserError: a parameter is not in the map, or its shape differs from the directory's.
        """
        unknown = [name for name in parameters if name not in self._rules]
        if unknown:
            raise UserError(
                f"{self._key}: {self.folder} has no tensor for {listed(unknown, SHOWN)}: the model has "
                "parameters that its family does not have; remove the keys that add them"
            )
        wrong = [
            mismatch for name, value in parameters.items() if (mismatch := self._mismatch(name, value, cuts[name]))
        ]
        if wrong:
            raise UserError(f"{self._key}: {self.folder} does not fit the model: {'; '.join(wrong[:SHOWN])}")
        with torch.no_grad():
            for name, value in parameters.items():
                self._fill(value, self._rules[name], cuts[name])

    def _fill(self, parameter: torch.Tensor, rule: Rule, cut: Cut) -> None:
        local = as_rows(parameter.data, sum(rows.count for rows in _pieces(rule, cut)))
        width = local.size(1) * (cut.ranks if cut.dim == 1 else 1)
        at = 0
        for rows in _pieces(rule, cut):
            parts: Iterator[torch.Tensor] = iter([self._new_rows(rule, rows, width, cut)])
            if rows.name:
                read = self._source.stack_rows if rows.stack else self._source.rows
                read = self._source.transposed_rows if len(rows.stack) == 3 and self.transposed else read
                span = (rows.count - 1) * rows.step + 1
                parts = read(self.stored_names[rows.name], rows.first, span, cut.columns(width))
                if rows.step > 1:
                    parts = iter([torch.cat([*parts])[:: rows.step]])
            for part in parts:
                local[at : at + len(part)] = part.to(device=local.device, dtype=local.dtype)
                at += len(part)
        assert at == len(local), rule.ours

    def _new_rows(self, rule: Rule, rows: Rows, width: int, cut: Cut) -> torch.Tensor:
        """Return rows that the directory lacks, equal at every layout."""
        if not rows.std or rows.name:
            return torch.zeros(rows.count, 1)
        first, last = cut.columns(width) or (0, width)
        drawn = torch.empty(rows.count, last - first)
        fill(drawn, rows.std, seed_for(self._seed, "new rows", rule.ours), rows.first, first)
        return drawn

    def _mismatch(self, name: str, parameter: torch.Tensor, cut: Cut) -> str:
        rule = self._rules[name]
        rows = sum(last - first for first, last in cut.ranges(sum(rows.count for rows in rule.rows)))
        named = next((rows for rows in rule.rows if rows.name), None)
        if named is None:  # all is drawn
            return ""
        width = prod(named.stack[2:] if named.stack else self._stored_shape(named.name)[1:])
        first, last = cut.columns(width) or (0, width)
        width = last - first
        if tuple(as_rows(parameter, rows).shape) == (rows, width):
            return ""
        named_rows = dict.fromkeys(rows.name for rows in rule.rows if rows.name)
        in_file = " and ".join(f"{stored_name} {self._stored_shape(stored_name)}" for stored_name in named_rows)
        expected = f"{tuple(parameter.shape)}" + (f" on each of {cut.ranks} ranks" if cut.ranks > 1 else "")
        return f"{in_file} there make {rows} x {width}, {name} here is {expected}"

    def _require_sinusoids(self, name: str) -> None:
        if name not in self.tensors:
            return
        stored = self._source.whole(name).float()
        length, width = stored.shape
        if float((stored - sinusoids(length, width, stored.device)).abs().max()) > SINUSOID_ERROR:
            raise UserError(
                f"{self._key}: {name} of {self.folder} are no sinusoids, and positions are computed here: no "
                "encoder of this family"
            )


def as_rows(parameter: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a parameter as a matrix, of `rows` rows if it stacks matrices with that many in all, else of its first
    dimension."""
    is_stack = parameter.dim() == 3 and parameter.size(0) * parameter.size(1) == rows
    return parameter.view(rows if is_stack else len(parameter), -1)


def _pieces(rule: Rule, cut: Cut) -> Iterator[Rows]:
    for first, last in cut.ranges(sum(rows.count for rows in rule.rows)):
        at = 0
        for rows in rule.rows:
            begin, end = max(first, at), min(last, at + rows.count)
            if begin < end:
                yield replace(rows, count=end - begin, first=rows.first + (begin - at) * rows.step)
            at += rows.count
