"""This rank's shards of parameters, buffers and optimizer state, and the other contents of a checkpoint."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from data.pipeline import Samples
from mimo_train.checkpoint.format.index import WEIGHT, Key
from mimo_train.checkpoint.format.spans import Span
from mimo_train.checkpoint.format.write import Part
from mimo_train.config.errors import UserError
from mimo_train.models.parameters import modules_of, tensor_names
from mimo_train.optim.module_optimizer import ModuleOptimizer

METADATA = {"singleton_local_shards": False}
"""Metadata with which Megatron-Core returns sharded state dicts."""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's states of a parameter."""


@dataclass(frozen=True)
class Held:
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
        """Return the key of this tensor or of one of its optimizer states."""
        return Key(self.module, self.name, state)

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, int, Span]]:
        """Yield (first element, last + 1, span of the whole tensor) for a flat range of this tensor."""
        for at, box in self.boxes:
            first, last = max(start, at), min(stop, at + box.numel)
            if first < last:
                yield first, last, box.part(first - at, last - at)


def held_tensors(model: list[MegatronModule]) -> list[Held]:
    """Return all parameters and buffers of this rank that belong in a checkpoint."""
    return [one for module, chunks in modules_of(model).items() for chunk in chunks for one in held_of(module, chunk)]


def held_of(module: str, chunk: MegatronModule) -> Iterator[Held]:
    """Yield the tensors of a module's model chunk. Raises UserError if a layer has a state that is not a tensor."""
    names, inner = tensor_names(chunk), unwrap_model(chunk)
    groups = getattr(inner, "pg_collection", None)
    # As in `MimoModel`: without it a plain GPT would look up Megatron-Core's global state.
    metadata = METADATA if groups is None else METADATA | {"dp_cp_group": groups.dp_cp}
    for place in nested_values(inner.sharded_state_dict(metadata=dict(metadata))):
        if isinstance(place, ShardedObject):
            _require_empty(module, place)
        elif isinstance(place, ShardedTensor | ShardedTensorFactory) and place.data is not None:
            yield _held(module, names[id(place.data)], place)


def _require_empty(module: str, place: ShardedObject) -> None:
    """Reject states that need pickle. Transformer Engine's `_extra_state` has one with delayed scaling only (2.20)."""
    data = place.data
    if isinstance(data, io.BytesIO):
        size = data.getbuffer().nbytes
    elif isinstance(data, torch.Tensor):
        size = data.nbytes
    else:
        size = 0 if data is None else 1
    if size:
        raise UserError(
            f"modules.{module}: {place.key} has a state of its own ({type(data).__name__}), which only a pickle can "
            "hold: checkpoints hold tensors, so that such a layer (fp8 of Transformer Engine before 2.20, or "
            "with delayed scaling) cannot be saved or loaded"
        )


def _held(module: str, name: str, place: ShardedBase) -> Held:
    parts = list(nested_values(place.build())) if isinstance(place, ShardedTensorFactory) else [place]
    first = place.data.storage_offset()
    boxes = []
    for part in parts:
        # The halves of a gated layer are consecutive views.
        assert part.data.is_contiguous(), f"{name}: its part is not contiguous"
        assert part.data.untyped_storage().data_ptr() == place.data.untyped_storage().data_ptr(), name
        # Skip the leading layer and expert numbers, which are in the name.
        shape, offset = (sizes[part.prepend_axis_num :] for sizes in (part.global_shape, part.global_offset))
        size = tuple(part.local_shape)
        boxes.append((part.data.storage_offset() - first, Span(tuple(shape), tuple(offset), size, 0, prod(size))))
    return Held(module, name, place.data, tuple(boxes), tuple(place.replica_id))


@dataclass(frozen=True)
class Updated:
    """The optimizer's values for a range of a parameter of this rank."""

    parameter: torch.nn.Parameter
    start: int
    stop: int
    values: dict[str, torch.Tensor]
    """Values by state, [stop - start] each; WEIGHT is the fp32 master copy."""
    is_cut: bool
    """True if data-parallel ranks have other ranges."""


def updated_ranges(optimizer: MegatronOptimizer) -> Iterator[Updated]:
    """Yield everything that a Megatron-Core optimizer holds on this rank; missing moments are created."""
    if optimizer.is_stub_optimizer:
        return
    optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
    if isinstance(optimizer, DistributedOptimizer):
        for parameter, place in _ranges(optimizer):
            states = optimizer._get_main_param_and_optimizer_states(parameter)
            values = {WEIGHT: states["param"], **{key: states[key] for key in MOMENTS}}
            yield Updated(parameter, place.start, place.end, _flat(values), is_cut=True)
        return
    for parameter in _parameters(optimizer):
        main = getattr(parameter, "main_param", parameter)
        state = optimizer.optimizer.state[main]
        values = {WEIGHT: main, **{key: state[key] for key in MOMENTS}}
        yield Updated(parameter, 0, parameter.numel(), _flat(values), is_cut=False)


def _flat(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.detach().view(-1) for key, value in values.items()}


def _parameters(optimizer: MegatronOptimizer) -> list[torch.nn.Parameter]:
    """Return the model's parameters of an optimizer whose replicas hold the whole state."""
    if hasattr(optimizer, "float16_groups"):
        groups = [*optimizer.float16_groups, *optimizer.fp32_from_fp32_groups]
        return [parameter for group in groups for parameter in group]
    return list(optimizer.get_parameters())


def _ranges(optimizer: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, Any]]:
    for by_dtype in optimizer.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for parameter, place in bucket["param_map"].items():
                    yield parameter, place["param"]


def trained_parameters(optimizer: MegatronOptimizer) -> set[int]:
    """Return the ids of all parameters that an optimizer updates, including those without a range on this rank."""
    if optimizer.is_stub_optimizer:
        return set()
    if isinstance(optimizer, DistributedOptimizer):
        return {id(parameter) for buffer in optimizer.buffers for parameter in buffer.param_index_map}
    return {id(parameter) for parameter in _parameters(optimizer)}


def parts_to_write(held: list[Held], optimizer: ModuleOptimizer, *, finite: bool) -> Iterator[Part]:
    """Yield this rank's parts of a checkpoint, as views of the live tensors; only the first of several replicas writes.

    Args:
        held: this rank's tensors of the model.
        finite: True to require finite weights.
    """
    by_parameter = {id(one.tensor): one for one in held}
    trained: set[int] = set()
    for each in optimizer.inner():
        trained |= trained_parameters(each)
        for updated in updated_ranges(each):
            one = by_parameter[id(updated.parameter)]
            if any(one.replica[:2] if updated.is_cut else one.replica):
                continue
            for first, last, span in one.spans(updated.start, updated.stop):
                for state, values in updated.values.items():
                    part = values[first - updated.start : last - updated.start]
                    yield Part(one.key(state), span, part, finite and state == WEIGHT)
    for one in held:
        if id(one.tensor) not in trained and not any(one.replica):
            flat = one.tensor.detach().reshape(-1)
            if flat.is_cuda and not isinstance(one.tensor, torch.nn.Parameter):
                flat = flat.clone()  # a forward pass may change it before its background copy
            for first, last, span in one.spans(0, one.tensor.numel()):
                yield Part(one.key(), span, flat[first:last])


class Stateful(Protocol):
    """Plain numbers in a checkpoint."""

    step: int

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: dict[str, float]) -> None: ...


class Sums(Protocol):
    """The log's sums since its last line, such as `mimo_train.training.log.StepLog`."""

    def state_dict(self) -> dict[str, Any] | None:
        """Return the sums on the rank that writes the log, None on others."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Repeatable(Protocol):
    """State of a step that may have to be repeated, such as `mimo_train.debug.rerun.Rerun`."""

    def state_dict(self, data: Any) -> dict[str, Any] | None: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


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
        size = (len(dataset.shards), sum(dataset.source_sizes))
        return cls(dataset.fingerprint, dataset.text_fingerprint, vocabulary, size)

    def record(self) -> dict[str, Any]:
        """Return the entries of a checkpoint's record."""
        names = {"data": self.data, "text": self.text, "vocabulary": self.vocabulary}
        return {f"{name}_fingerprint": value for name, value in names.items()} | {"data_size": self.data_size}
