"""A checkpoint -> a directory as `transformers` saves it, on one process, a few tensors at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from encoders.weight_map import Rule, WeightMap, spelt
from mimo_train.checkpoint.frozen_base import own_tensors
from mimo_train.checkpoint.hf.fill import Reader
from mimo_train.checkpoint.hf.parts import Part
from mimo_train.checkpoint.hf.slices import SliceReader
from mimo_train.checkpoint.hf.tensors import Planned, TensorFolder, write_tensors
from mimo_train.checkpoint.store import CONTENT
from mimo_train.model.names import modules_of


class Weights:
    """The parameters of a model in a checkpoint, one at a time. The model lends names and shapes; its own values are
    neither read nor written.

    Args:
        folder: of the checkpoint.
        chunk: the run on one process.
        module: name of the module whose parameters these are.
    """

    def __init__(self, folder: Path, chunk: MegatronModule, module: str):
        self._reader = SliceReader(folder)
        ((model,),) = [of for name, of in modules_of([chunk]).items() if name == module]
        self.parameters = dict(unwrap_model(model).named_parameters())
        # By the names that they have in the whole model, as in the checkpoint.
        state, names = unwrap_model(chunk).sharded_state_dict(metadata=dict(CONTENT)), own_tensors(chunk)
        entries = {id(value): state[name] for name, value in names.items() if name in state}
        self._state = {name: entries[id(value)] for name, value in own_tensors(model).items() if id(value) in entries}

    def load(self, name: str) -> torch.Tensor:
        """The value of a parameter."""
        entry = self._state[name]
        if not isinstance(entry, ShardedTensorFactory):
            return self._reader.read(entry)
        parts = entry.build()
        dict_list_map_inplace(self._reader.read, parts)
        return entry.merge_fn(parts)


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
        theirs: dict[str, torch.Tensor] = {}
        for rule in group.rules:
            _hand_out(rule, source.load(rule.ours), counts, theirs)
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


def write_weights(
    parts: Sequence[Part],
    chunk: MegatronModule,
    checkpoint: Path,
    to: Path,
    *,
    dtype: torch.dtype,
    largest_file: int,
) -> None:
    """Write parts of a model that make one directory. Tensors of the directory that they came from that take no part in
    training are copied.

    Args:
        parts: of one directory.
        chunk: the run on one process, which lends names and shapes.
        checkpoint: folder that the values are read from.
        largest_file: in bytes.
    """
    sources = {part.module: Weights(checkpoint, chunk, part.module) for part in parts}
    planned: list[Planned] = []
    for part in parts:
        planned += planned_tensors(part.written, sources[part.module].parameters, dtype)
    folder = TensorFolder(parts[0].folder, parts[0].key)
    carried = _carried(parts, folder, {tensor.name for tensor in planned})
    planned += [Planned(carried[name], folder.tensors[name].shape, folder.tensors[name].dtype) for name in carried]
    values = chain(
        *(tensors_of(part.written, sources[part.module], dtype) for part in parts),
        (folder.whole(name) for name in carried),
    )
    write_tensors(to, planned, values, largest_file)


def _carried(parts: Sequence[Part], folder: TensorFolder, written: set[str]) -> dict[str, str]:
    """Tensors of the directory that no part writes, by whatever name, and the names by which they are copied."""
    readers = [Reader(folder, part.weights, part.key) for part in parts]
    made = {name for reader in readers for name in reader.read_names}
    carried = {}
    for name in folder.tensors:
        new = next((reader.written_name(name) for reader in readers if reader.uses(name)), name)
        if name not in made and new not in written:
            carried[name] = new
    return carried
