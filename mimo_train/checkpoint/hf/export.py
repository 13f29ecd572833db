"""A checkpoint -> a directory as `transformers` saves it, on one process, a few tensors at a time."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from encoders.weight_map import Rule, WeightMap, spelt
from mimo_train.checkpoint.hf.tensors import Planned
from mimo_train.checkpoint.store import CONTENT


class Weights:
    """The parameters of a model in a checkpoint, a few at a time. The model lends names and shapes; its own values are
    neither read nor written.

    Args:
        folder: of the checkpoint.
        model: a module of the run on one process.
    """

    def __init__(self, folder: Path, model: MegatronModule):
        self._folder = folder
        self._state = unwrap_model(model).sharded_state_dict(metadata=dict(CONTENT))
        self.parameters = dict(unwrap_model(model).named_parameters())

    def load(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Values of parameters, by name."""
        state = {}
        for name in names:
            # A copy, which goes when the caller is done with it; the entry itself stays without values.
            state[name] = replace(self._state[name], data=torch.empty_like(self.parameters[name].data))
        return dist_checkpointing.load(state, str(self._folder))


@dataclass(frozen=True)
class Group:
    """Rules that name the same tensors of the directory, and so are written together."""

    rules: tuple[Rule, ...]
    tensors: tuple[str, ...]
    """By their names in the map."""


def groups_of(weights: WeightMap) -> list[Group]:
    """The rules of a map in groups as small as can be, in the order of the map."""
    by_tensor: dict[str, list[Rule]] = {}
    for rule in weights.rules:
        joined, tensors = [rule], {rows.name: None for rows in rule.rows if rows.name}
        for name in list(tensors):
            for other in by_tensor.get(name, []):
                if other not in joined:
                    joined.insert(-1, other)
                    tensors |= {rows.name: None for rows in other.rows if rows.name}
        for name in tensors:
            by_tensor[name] = joined
    found = {id(joined): joined for joined in by_tensor.values()}
    return [
        Group(tuple(rules), tuple(dict.fromkeys(rows.name for rule in rules for rows in rule.rows if rows.name)))
        for rules in found.values()
    ]


def planned_tensors(weights: WeightMap, parameters: dict[str, torch.Tensor], dtype: torch.dtype) -> list[Planned]:
    """What is written for a part of a model, in the order in which `tensors_of` gives it.

    Args:
        parameters: of the part, whole.
    """
    counts, spelling = weights.row_counts(), weights.prefixes[0]
    planned = []
    for group in groups_of(weights):
        shapes: dict[str, tuple[int, ...]] = {}
        for rule in group.rules:
            for rows in rule.rows:
                if rows.name:
                    tail = rows.tail or tuple(parameters[rule.ours].shape[1:])
                    shapes.setdefault(rows.name, (counts[rows.name], *tail))
        planned += [Planned(spelt(name, spelling), shapes[name], dtype) for name in group.tensors]
    return planned


def tensors_of(weights: WeightMap, source: Weights, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The tensors of a part of a model, one after the other; those of one group are in memory together."""
    counts = weights.row_counts()
    for group in groups_of(weights):
        values = source.load([rule.ours for rule in group.rules])
        theirs: dict[str, torch.Tensor] = {}
        for rule in group.rules:
            _hand_out(rule, values[rule.ours], counts, theirs)
        del values
        for name in group.tensors:
            yield theirs.pop(name).to(dtype)


def _hand_out(rule: Rule, value: torch.Tensor, counts: dict[str, int], theirs: dict[str, torch.Tensor]) -> None:
    """Put the rows of one parameter into the tensors that they belong to."""
    at = 0
    for rows in rule.rows:
        part = value[at : at + rows.count]
        at += rows.count
        if not rows.name:
            continue
        tail = rows.tail or tuple(value.shape[1:])
        if rows.name not in theirs:
            theirs[rows.name] = torch.empty(counts[rows.name], *tail, dtype=value.dtype)
        theirs[rows.name][rows.first : rows.first + rows.count] = part.reshape(rows.count, *tail)
    assert at == len(value), rule.ours
