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
from mimo_train.config.errors import UserError
from mimo_train.models.parameters import modules_of, tensor_names

METADATA = {"singleton_local_shards": False}
"""How Megatron-Core is asked for the places of tensors."""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""State of Adam for a parameter."""


@dataclass(frozen=True)
class Held:
    """A parameter or buffer of this rank, of which it may have only a part."""

    module: str
    name: str
    """In its module, the same at every layout."""
    tensor: torch.Tensor
    boxes: tuple[tuple[int, Span], ...]
    """Boxes of the whole tensor that follow each other in this one: each with its first element here."""
    replica: tuple[int, ...]
    """Which copy this is among pipeline stages, tensor-parallel and data-parallel ranks: all 0 for the first."""

    def key(self, state: str = WEIGHT) -> Key:
        """What it, or a state of the optimizer for it, is called."""
        return Key(self.module, self.name, state)

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, int, Span]]:
        """A flat range of this tensor: (first element, last + 1, what they are of the whole tensor)."""
        for at, box in self.boxes:
            first, last = max(start, at), min(stop, at + box.numel)
            if first < last:
                yield first, last, box.part(first - at, last - at)


def held_tensors(model: list[MegatronModule]) -> list[Held]:
    """All parameters and buffers of this rank that a checkpoint has."""
    return [one for module, chunks in modules_of(model).items() for chunk in chunks for one in held_of(module, chunk)]


def held_of(module: str, chunk: MegatronModule) -> Iterator[Held]:
    """Those of one model chunk of a module.

    Raises:
        UserError: a layer has a state that is no tensor.
    """
    names, inner = tensor_names(chunk), unwrap_model(chunk)
    groups = getattr(inner, "pg_collection", None)
    # As `MimoModel` does for its modules: without it a plain GPT would look up Megatron-Core's global state.
    metadata = METADATA if groups is None else METADATA | {"dp_cp_group": groups.dp_cp}
    for place in nested_values(inner.sharded_state_dict(metadata=dict(metadata))):
        if isinstance(place, ShardedObject):
            _require_empty(module, place)
        elif isinstance(place, ShardedTensor | ShardedTensorFactory) and place.data is not None:
            yield _held(module, names[id(place.data)], place)


def _require_empty(module: str, place: ShardedObject) -> None:
    """Transformer Engine's `_extra_state` is empty, but for delayed scaling a pickle in a tensor (2.20)."""
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
        # The halves of a gated layer are views, one behind the other.
        assert part.data.is_contiguous(), f"{name}: its part is not contiguous"
        assert part.data.untyped_storage().data_ptr() == place.data.untyped_storage().data_ptr(), name
        # In front are the numbers of layer and expert, which the name has.
        shape, offset = (sizes[part.prepend_axis_num :] for sizes in (part.global_shape, part.global_offset))
        size = tuple(part.local_shape)
        boxes.append((part.data.storage_offset() - first, Span(tuple(shape), tuple(offset), size, 0, prod(size))))
    return Held(module, name, place.data, tuple(boxes), tuple(place.replica_id))


@dataclass(frozen=True)
class Updated:
    """What the optimizer has for a range of a parameter of this rank."""

    parameter: torch.nn.Parameter
    start: int
    stop: int
    values: dict[str, torch.Tensor]
    """By state, [stop - start] each: WEIGHT is the fp32 master copy."""
    is_cut: bool
    """Whether data-parallel ranks have other ranges."""


def updated_ranges(optimizer: MegatronOptimizer) -> Iterator[Updated]:
    """Everything that one of Megatron-Core's optimizers holds on this rank; its moments are made if there are none."""
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
    """The model's parameters of an optimizer whose whole state is on every replica."""
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
    """Ids of the model's parameters that an optimizer updates, also of those of which this rank has no range."""
    if optimizer.is_stub_optimizer:
        return set()
    if isinstance(optimizer, DistributedOptimizer):
        return {id(parameter) for buffer in optimizer.buffers for parameter in buffer.param_index_map}
    return {id(parameter) for parameter in _parameters(optimizer)}


class Stateful(Protocol):
    """Plain numbers that a checkpoint holds."""

    step: int

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: dict[str, float]) -> None: ...


class Sums(Protocol):
    """What the log has summed since its last line, for example `mimo_train.training.log.StepLog`."""

    def state_dict(self) -> dict[str, Any] | None:
        """On the rank that writes the log; None on others."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Repeatable(Protocol):
    """State of a step that may have to be repeated, for example `mimo_train.debug.rerun.Rerun`."""

    def state_dict(self, data: Any) -> dict[str, Any] | None: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Fingerprints:
    """What a run reads, as far as a checkpoint depends on it."""

    data: str
    """Of the training shards; a checkpoint of others is refused."""
    text: str
    """Of tokenizer, chat template and placeholders, likewise."""
    vocabulary: str
    """Of the tokenizer's vocabulary; weights that were trained with another one are refused."""

    data_size: tuple[int, int] | None = None
    """(shards, samples) of the training data, so that it can be said how others differ."""

    @classmethod
    def of(cls, dataset: Samples, vocabulary: str) -> "Fingerprints":
        """Those of a run's training samples."""
        size = (len(dataset.shards), sum(dataset.source_sizes))
        return cls(dataset.fingerprint, dataset.text_fingerprint, vocabulary, size)

    def record(self) -> dict[str, Any]:
        """As a checkpoint's record has them."""
        names = {"data": self.data, "text": self.text, "vocabulary": self.vocabulary}
        return {f"{name}_fingerprint": value for name, value in names.items()} | {"data_size": self.data_size}
