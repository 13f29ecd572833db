"""Export a checkpoint as a `transformers` directory, on one process, a few tensors at a time."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from data.storage.url import Place
from encoders.weight_map import Rule, WeightMap, spelt, stored_stack
from mimo_train.checkpoint.damage import damage_named
from mimo_train.checkpoint.format.read import Reader, Wanted
from mimo_train.checkpoint.load import weight_key
from mimo_train.checkpoint.local_shards import shards_of_model
from mimo_train.config.parts import is_adapter
from mimo_train.hf.directory import write_config, write_json
from mimo_train.hf.documents import Document, Whole, Written, grown
from mimo_train.hf.fill import as_rows
from mimo_train.hf.tensors import Planned, write_tensors
from mimo_train.models.lora.adapters import adapted_layers, quantized_layers
from mimo_train.models.parameters import modules_of
from mimo_train.models.transformer_config import DTYPES


class Stored:
    """The tensors of a checkpoint, loaded one at a time, by the tensors of a model on one process.

    Attributes:
        modules: modules of the model by name.
    """

    def __init__(self, chunk: MegatronModule, folder: Place | None, *, ema: bool = False):
        """Match a model with a checkpoint.

        Args:
            chunk: the model; its tensors provide names and shapes.
            folder: checkpoint to read values from; None if the model has the values.
            ema: read averages of weights where the checkpoint has them.
        """
        self.modules = {name: unwrap_model(module) for name, (module,) in modules_of([chunk]).items()}
        self._folder, self._reader, self._ema = folder, None, ema
        if folder is not None:
            with damage_named(folder):
                self._reader = Reader(folder)
        self._held = {id(shard.tensor): shard for shard in shards_of_model([chunk])}

    def has(self, tensor: torch.Tensor) -> bool:
        """True if checkpoints have this tensor of the model."""
        return id(tensor) in self._held

    def load(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the checkpoint's value of a model tensor, in the stored dtype. Raises UserError if it is damaged."""
        if self._folder is None or self._reader is None:
            return tensor.detach().cpu()
        shard = self._held[id(tensor)]
        key = weight_key(shard, self._reader, ema=self._ema)
        value = torch.empty(tensor.shape, dtype=self._reader.dtype(key))
        spans = shard.spans(0, value.numel())
        with damage_named(self._folder):
            self._reader.fill(Wanted(key, span, value.view(-1)[first:last]) for first, last, span in spans)
        return value


class WeightSource(Protocol):
    """The tensors of one module."""

    @property
    def model(self) -> MegatronModule:
        """The module."""
        ...

    tensors: dict[str, torch.Tensor]
    """Its parameters and stored buffers by name, which provide names and shapes."""

    def load(self, name: str) -> torch.Tensor:
        """Return the value of a tensor."""
        ...


class Weights:
    """The tensors of one module in a checkpoint.

    Attributes:
        model: the module.
        tensors: its parameters and stored buffers by name, which provide names and shapes.
    """

    def __init__(self, stored: Stored, module: str, *, merge: bool = False):
        """Select a module.

        Args:
            merge: True to merge adapters into their weights.
        """
        self._stored, self.model = stored, stored.modules[module]
        model = self.model
        layers = list(adapted_layers(model)) if merge else []
        self._quantized: dict[str, Any] = {f"{path}.weight": layer for path, layer in quantized_layers(model)}
        self._adapted: dict[str, Any] = {f"{path}.weight": layer for path, layer in layers}
        tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        self.tensors = {name: value for name, value in tensors if stored.has(value)}
        for name, layer in self._quantized.items():
            rows, packed = layer.weight.shape
            self.tensors[name] = torch.empty(rows, 2 * packed, dtype=layer.config.params_dtype, device="meta")
            del self.tensors[f"{name}_scales"]

    def load(self, name: str) -> torch.Tensor:
        """Return the value of a tensor."""
        if name in self._quantized:
            return self._dequantized(name)
        base = self._stored.load(self.tensors[name])
        return self._merged(name, base) if name in self._adapted else base

    def is_quantized(self, name: str) -> bool:
        """True if a weight is in 4 bits."""
        return name in self._quantized

    @torch.no_grad()
    def _dequantized(self, name: str) -> torch.Tensor:
        layer, dtype = self._quantized[name], self.tensors[name].dtype
        for parameter in (layer.weight, layer.weight_scales):
            parameter.copy_(self._stored.load(parameter))
        if name not in self._adapted:
            return layer.full_weight().cpu()
        for _, _, parameter, _ in layer.named_adapters():
            parameter.copy_(self._stored.load(parameter))
        return layer.merged_weight().to(dtype).cpu()

    @torch.no_grad()
    def _merged(self, name: str, base: torch.Tensor) -> torch.Tensor:
        """Return a weight merged with its adapters; the layer computes it and holds the weight meanwhile."""
        layer = self._adapted[name]
        weight, device = layer.weight.data, layer.weight.device
        for _, _, parameter, _ in layer.named_adapters():
            parameter.copy_(self._stored.load(parameter))
        layer.weight.data = base.to(device)
        try:
            return layer.merged_weight().to(base.dtype).cpu()
        finally:
            layer.weight.data = weight


@dataclass(frozen=True)
class Group:
    """Rules that share tensors of the directory, and so are written together."""

    rules: tuple[Rule, ...]
    tensors: tuple[str, ...]
    """Names in the map."""

    def dtype(self, weights: torch.dtype) -> torch.dtype:
        """Return the dtype of its tensors in a directory with `weights`."""
        return torch.float32 if any(rule.fp32 for rule in self.rules) else weights


def groups_of(weights: WeightMap) -> list[Group]:
    """Return a map's rules in the smallest possible groups, in the order of the map."""
    # Rules and tensors of a group, by tensor. Groups that a rule joins become one.
    groups: dict[str, tuple[dict[str, Rule], dict[str, None]]] = {}
    for rule in weights.rules:
        rules: dict[str, Rule] = {}
        tensors: dict[str, None] = {}
        names = {rows.name: None for rows in rule.rows if rows.name}
        for other in {id(groups[name]): groups[name] for name in names if name in groups}.values():
            rules |= other[0]
            tensors |= other[1]
        rules[rule.ours] = rule
        tensors |= names
        groups |= dict.fromkeys(tensors, (rules, tensors))
    unique = {id(group): group for group in groups.values()}
    return [Group(tuple(rules.values()), tuple(tensors)) for rules, tensors in unique.values()]


def planned_tensors(part: Written, parameters: dict[str, torch.Tensor], dtype: torch.dtype) -> list[Planned]:
    """Return the tensors to write for a part, in the order of `tensors_of`.

    Args:
        parameters: whole parameters of the part.
    """
    weights = part.weights
    counts, spelling = weights.row_counts(), weights.prefixes[0]
    counts |= {name: max(rows, counts[name]) for name, rows in part.rows.items() if name in counts}
    planned = []
    for group in groups_of(weights):
        shapes: dict[str, tuple[int, ...]] = {}
        for rule in group.rules:
            for rows in rule.rows:
                if rows.name:
                    tail = rows.tail or tuple(parameters[rule.ours].shape[1:])
                    shape = stored_stack(rows.stack, part.transposed) if rows.stack else (counts[rows.name], *tail)
                    shapes.setdefault(rows.name, shape)
        planned += [Planned(spelt(name, spelling), shapes[name], group.dtype(dtype)) for name in group.tensors]
    return planned


def tensors_of(part: Written, source: WeightSource, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield the tensors of a part; those of one group are in memory together."""
    counts, stacks = part.weights.row_counts(), part.weights.stacks()
    for group in groups_of(part.weights):
        theirs: dict[str, torch.Tensor] = {}
        for rule in group.rules:
            _hand_out(rule, source.load(rule.ours), counts, theirs)
        for name in group.tensors:
            value = theirs.pop(name).to(group.dtype(dtype))
            if name in stacks:
                value = value.view(stacks[name])
                yield value.transpose(1, 2) if part.transposed and value.dim() == 3 else value
            else:
                yield grown(value, part.rows.get(name, 0))


def _hand_out(rule: Rule, value: torch.Tensor, counts: dict[str, int], theirs: dict[str, torch.Tensor]) -> None:
    at, shape = 0, tuple(value.shape)
    value = as_rows(value.contiguous(), sum(rows.count for rows in rule.rows))
    for rows in rule.rows:
        part = value[at : at + rows.count]
        at += rows.count
        if not rows.name:
            continue
        tail = rows.tail or shape[1:]
        if rows.name not in theirs:
            theirs[rows.name] = value.new_empty(counts[rows.name], *tail)
        theirs[rows.name][rows.first : rows.first + rows.count * rows.step : rows.step] = part.reshape(
            rows.count, *tail
        )
    assert at == len(value), rule.ours


def write_document(
    document: Document,
    stored: Stored,
    to: Path,
    *,
    dtype: str,
    largest_file: int,
    merge: bool = False,
) -> None:
    """Write a directory: weights, config.json and the other files.

    Args:
        dtype: dtype of the weights: fp32, bf16 or fp16.
        largest_file: size in bytes.
    """
    sources = {name: Weights(stored, name, merge=merge) for name in document.modules}
    planned, values = contents_of(document, sources, DTYPES[dtype])
    document.write_files(to)
    write_tensors(to, planned, values, largest_file)
    if document.is_plain:
        write_json(to / "config.json", document.config)
    else:
        write_config(to, document.config, dtype)


def contents_of(
    document: Document, sources: Mapping[str, WeightSource], kind: torch.dtype
) -> tuple[list[Planned], Iterator[torch.Tensor]]:
    """Return the tensors of a directory, and their values in this order.

    Args:
        sources: by module.
        kind: dtype of the weights.
    """
    planned: list[Planned] = []
    for part in document.parts:
        planned += planned_tensors(part, sources[part.module].tensors, kind)
    plain = [pair for module in document.whole for pair in tensors_in_our_names(module, sources[module.module], kind)]
    planned += [tensor for tensor, _ in plain]
    planned += [Planned(extra.name, extra.shape, extra.dtype or kind) for extra in document.extras]
    values = chain(
        *(tensors_of(part, sources[part.module], kind) for part in document.parts),
        (load() for _, load in plain),
        (extra.load().to(extra.dtype or kind) for extra in document.extras),
    )
    return planned, values


def tensors_in_our_names(
    part: Whole, source: WeightSource, dtype: torch.dtype | None = None
) -> Iterator[tuple[Planned, Callable[[], torch.Tensor]]]:
    """Yield tensors by our own names, or as renamed by `Whole.rename`; `dtype` None: as stored."""
    if part.rename is not None:
        names = [name for name in source.tensors if name.startswith(part.begins) and not is_adapter(name)]
        loaded = {name.removeprefix(part.begins): source.load(name) for name in names}
        for name, value in part.rename(source.model, loaded, dtype).items():
            yield Planned(name, tuple(value.shape), value.dtype), partial(lambda value: value, value)
        return
    for name, value in source.tensors.items():
        if name.startswith(part.begins) and not is_adapter(name):
            kind = dtype if dtype and value.is_floating_point() else value.dtype
            load = partial(lambda name, kind: source.load(name).to(kind), name, kind)
            yield Planned(name.removeprefix(part.begins), tuple(value.shape), kind), load
