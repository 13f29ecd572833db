"""This rank's shards of parameters, buffers and optimizer state, and the fingerprints of a run's inputs."""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from data.samples.protocol import Samples
from mimo_train.checkpoint.format.index import WEIGHT, Key
from mimo_train.checkpoint.format.spans import Span
from mimo_train.checkpoint.format.write import Part
from mimo_train.config.errors import UserError
from mimo_train.models.parameters import modules_of, tensor_names
from mimo_train.models.sharding import ShardedModule, shard_of
from mimo_train.optim.group_optimizer import FACTORS
from mimo_train.optim.module_optimizer import ModuleOptimizer, ShardOptimizer
from mimo_train.optim.shards import model_parameters

METADATA = {"singleton_local_shards": False}
"""Metadata with which Megatron-Core returns sharded state dicts."""


@dataclass(frozen=True)
class LocalShard:
    """A parameter or buffer of this rank, possibly only a part of it."""

    module: str
    name: str
    """Name in its module, equal at every layout."""
    tensor: torch.Tensor
    boxes: tuple[tuple[int, Span], ...]
    """Consecutive boxes of the whole tensor in this one: (first element here, span)."""
    replica: tuple[int, ...]
    """Index of this copy among pipeline stages, tensor-parallel and data-parallel ranks; all 0 for the first."""

    def key(self, state: str = WEIGHT) -> Key:
        """Return the key of this tensor or of one of its optimizer states. A name has one shape: states of other shapes
        have names of their own."""
        return Key(self.module, f"{self.name}.{state}" if state in FACTORS else self.name, state)

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, int, Span]]:
        """Yield (first element, last + 1, span of the whole tensor) for a flat range of this tensor."""
        for at, box in self.boxes:
            first, last = max(start, at), min(stop, at + box.numel)
            if first < last:
                yield first, last, box.part(first - at, last - at)

    def spans_along(self, dim: int, *, once: bool = False) -> Iterator[tuple[int, int, Span]]:
        """Yield (first, last + 1, span) of a vector with an entry for each row (0) or column (1) of this matrix. With
        `once` those of the ranks with the first column or row, so that tensor-parallel ranks yield each entry once."""
        for at, box in self.boxes if dim == 0 else self.boxes[:1]:
            if once and box.offset[1 - dim]:
                continue
            size = box.size[dim]
            first = at // box.size[1] if dim == 0 else 0
            yield first, first + size, Span((box.shape[dim],), (box.offset[dim],), (size,), 0, size)


def shards_of_model(model: list[MegatronModule]) -> list[LocalShard]:
    """Return all parameters and buffers of this rank that belong in a checkpoint."""
    return [
        shard
        for module, chunks in modules_of(model).items()
        for chunk in chunks
        for shard in shards_of_module(module, chunk)
    ]


def shards_of_module(module: str, chunk: MegatronModule) -> Iterator[LocalShard]:
    """Yield the tensors of a module's model chunk. Raises UserError if a layer has a state that is not a tensor."""
    names, inner = tensor_names(chunk), unwrap_model(chunk)
    if isinstance(chunk, ShardedModule):
        yield from _rows_of_module(module, chunk)
        return
    groups = getattr(inner, "pg_collection", None)
    # As in `MimoModel`: without it a plain GPT would look up Megatron-Core's global state.
    metadata = METADATA if groups is None else METADATA | {"dp_cp_group": groups.dp_cp}
    for sharded in nested_values(inner.sharded_state_dict(metadata=dict(metadata))):
        if isinstance(sharded, ShardedObject):
            _require_empty(module, sharded)
        elif isinstance(sharded, ShardedTensor | ShardedTensorFactory) and sharded.data is not None:
            yield _shard(module, names[id(sharded.data)], sharded)


def _rows_of_module(module: str, chunk: ShardedModule) -> Iterator[LocalShard]:
    """Yield the tensors of a sharded module: rows of parameters, buffers as replicas."""
    state = unwrap_model(chunk).state_dict(keep_vars=True)  # puts torch's shards in place
    names = tensor_names(chunk)
    for tensor in {id(value): value for value in state.values()}.values():
        name, shape = names[id(tensor)], tuple(tensor.shape)
        local, rows = shard_of(tensor)
        first = rows.ranges(len(tensor))[0][0] if rows else 0
        span = Span(shape, (first, *(0 for _ in shape[1:])) if shape else (), tuple(local.shape), 0, local.numel())
        replica = (0, 0, 0) if rows else (0, 0, chunk.group.rank())
        if local.numel():
            yield LocalShard(module, name, chunk.shards.get(tensor, tensor), ((0, span),), replica)


def _require_empty(module: str, sharded: ShardedObject) -> None:
    """Reject states that need pickle. Transformer Engine's `_extra_state` has one with delayed scaling only (2.20)."""
    data = sharded.data
    if isinstance(data, io.BytesIO):
        size = data.getbuffer().nbytes
    elif isinstance(data, torch.Tensor):
        size = data.nbytes
    else:
        size = 0 if data is None else 1
    if size:
        raise UserError(
            f"modules.{module}: {sharded.key} has a state of its own ({type(data).__name__}), which only a pickle can "
            "hold: checkpoints hold tensors, so that such a layer (fp8 of Transformer Engine before 2.20, or "
            "with delayed scaling) cannot be saved or loaded"
        )


def _shard(module: str, name: str, sharded: ShardedBase) -> LocalShard:
    parts = list(nested_values(sharded.build())) if isinstance(sharded, ShardedTensorFactory) else [sharded]
    first = sharded.data.storage_offset()
    boxes = []
    # Sections of a Gated DeltaNet have keys and shapes of their own: lay them one behind the other.
    rows = {part.key: part.global_shape[part.prepend_axis_num :][:1] for part in parts}
    ends = dict(zip(rows, accumulate(sum(each) for each in rows.values()), strict=True))
    for part in parts:
        # The halves of a gated layer are consecutive views.
        assert part.data.is_contiguous(), f"{name}: its part is not contiguous"
        assert part.data.untyped_storage().data_ptr() == sharded.data.untyped_storage().data_ptr(), name
        # Skip the leading layer and expert numbers, which are in the name.
        shape, offset = (sizes[part.prepend_axis_num :] for sizes in (part.global_shape, part.global_offset))
        size = tuple(part.local_shape)
        if len(rows) > 1:
            offset = (ends[part.key] - shape[0] + offset[0], *offset[1:])
            shape = (max(ends.values()), *shape[1:])
        boxes.append((part.data.storage_offset() - first, Span(tuple(shape), tuple(offset), size, 0, prod(size))))
    return LocalShard(module, name, sharded.data, tuple(boxes), tuple(sharded.replica_id))


@dataclass(frozen=True)
class OptimizerShard:
    """The optimizer's values for a range of a parameter of this rank."""

    parameter: torch.nn.Parameter
    start: int
    stop: int
    values: dict[str, torch.Tensor]
    """Values by state, [stop - start] each; WEIGHT is the fp32 master copy. `FACTORS` have one for each row or column
    of the parameter."""
    is_cut: bool
    """True if data-parallel ranks have other ranges."""
    stored: Callable[[], None]
    """Function to call after a change of `values`, which may be copies."""

    def spans(self, shard: LocalShard, state: str, *, once: bool = False) -> Iterator[tuple[Span, torch.Tensor]]:
        """Yield (span of the whole tensor or of its rows or columns, values) of a state.

        Args:
            shard: of the parameter.
            once: leave out what other ranks yield too, except replicas of `shard`.
        """
        values = self.values[state]
        if state in FACTORS:
            if not (once and self.start > 0):
                along = shard.spans_along(FACTORS[state], once=once)
                yield from ((span, values[first:last]) for first, last, span in along)
            return
        for first, last, span in shard.spans(self.start, self.stop):
            yield span, values[first - self.start : last - self.start]


def optimizer_shards(optimizer: MegatronOptimizer) -> Iterator[OptimizerShard]:
    """Yield everything that a Megatron-Core optimizer holds on this rank; missing moments are created."""
    if optimizer.is_stub_optimizer:
        return
    inner = optimizer.optimizer
    inner.init_states()
    is_cut = isinstance(optimizer, DistributedOptimizer | ShardOptimizer)
    for main, shard in inner.shards.items():
        values = inner.read_states(main)
        stored = partial(inner.write_states, main, values)
        values = {WEIGHT: main.detach().view(-1), **values}
        yield OptimizerShard(shard.parameter, shard.start, shard.stop, values, is_cut, stored)


def trained_parameters(optimizer: MegatronOptimizer) -> set[int]:
    """Return the ids of all parameters that an optimizer updates, including those without a range on this rank."""
    if optimizer.is_stub_optimizer:
        return set()
    if isinstance(optimizer, DistributedOptimizer):
        return {id(parameter) for buffer in optimizer.buffers for parameter in buffer.param_index_map}
    return {id(parameter) for parameter in model_parameters(optimizer)}


def parts_to_write(shards: list[LocalShard], optimizer: ModuleOptimizer, *, finite: bool) -> Iterator[Part]:
    """Yield this rank's parts of a checkpoint, as views of the live tensors; only the first of several replicas writes.

    Args:
        shards: this rank's tensors of the model.
        finite: True to require finite weights.
    """
    by_parameter = {id(shard.tensor): shard for shard in shards}
    trained: set[int] = set()
    for inner_optimizer in optimizer.inner():
        trained |= trained_parameters(inner_optimizer)
        for updated in optimizer_shards(inner_optimizer):
            shard = by_parameter[id(updated.parameter)]
            if any(shard.replica[:2] if updated.is_cut else shard.replica):
                continue
            for state in updated.values:
                for span, values in updated.spans(shard, state, once=True):
                    yield Part(shard.key(state), span, values, finite and state == WEIGHT)
    for shard in shards:
        if id(shard.tensor) not in trained and not any(shard.replica):
            flat = shard.tensor.detach().reshape(-1)
            if flat.is_cuda and not isinstance(shard.tensor, torch.nn.Parameter):
                flat = flat.clone()  # a forward pass may change it before its background copy
            for first, last, span in shard.spans(0, shard.tensor.numel()):
                yield Part(shard.key(), span, flat[first:last])


@dataclass(frozen=True)
class Fingerprints:
    """Fingerprints of the inputs that a checkpoint depends on."""

    data: str
    """Training shards; checkpoints of other shards are rejected."""
    text: str
    """Tokenizer, chat template and placeholders; other ones are rejected."""
    vocabulary: str
    """Vocabulary; weights trained with another one are rejected."""

    data_size: tuple[int, int] | None = None
    """(shards, samples) of the training data, for error messages."""

    @classmethod
    def of(cls, dataset: Samples, vocabulary: str) -> "Fingerprints":
        """Return the fingerprints of a run's training samples."""
        size = (len(dataset.shards), sum(dataset.order.sizes))
        return cls(dataset.fingerprint, dataset.text_fingerprint, vocabulary, size)

    def record(self) -> dict[str, Any]:
        """Return the entries of a checkpoint's record."""
        names = {"data": self.data, "text": self.text, "vocabulary": self.vocabulary}
        return {f"{name}_fingerprint": value for name, value in names.items()} | {"data_size": self.data_size}
