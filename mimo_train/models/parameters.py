"""Parameters of a model: seeds of their initial values, names in the whole model, and attributes for Megatron-Core.
With `optim.overlap_param_gather` pre-hooks of Megatron-Core's wrappers gather parameters during the forward pass. Code
that reads parameters outside of a forward pass, for example to save them, must use `gathered`."""

import hashlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from megatron.core.utils import unwrap_model
from torch.distributed import ProcessGroup

from encoders.errors import EncoderError
from encoders.initial_weights import Normal
from encoders.plain.model import PlainEncoder
from mimo_train.config.errors import UserError
from mimo_train.config.parts import LANGUAGE


def seed_for(seed: int, *names: object) -> int:
    """Return the seed of one named part of a run, the same on every rank and machine."""
    text = "/".join(str(name) for name in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def mark(tensor: torch.Tensor, **marks: object) -> None:
    """Set attributes of a tensor that Megatron-Core looks for, such as `sequence_parallel`; torch declares none."""
    for name, value in marks.items():
        setattr(tensor, name, value)


@dataclass(frozen=True)
class Cut:
    """The part of a parameter that tensor parallelism leaves on one rank."""

    dim: int | None = None
    """Dimension that is cut; None if uncut."""
    sections: tuple[int, ...] = (1,)
    """Relative sizes of the sections of rows, each of which is cut: gate and up, or queries, keys and values."""
    rank: int = 0
    ranks: int = 1

    @classmethod
    def of(cls, parameter: torch.Tensor, rank: int, ranks: int) -> "Cut":
        """Return how Megatron-Core has cut a parameter. `partition_sections` are of `DeltaNet`."""
        sections = getattr(parameter, "partition_sections", None) or (1,) * parameter.partition_stride  # type: ignore[attr-defined]
        return cls(parameter.partition_dim, sections, rank, ranks)  # type: ignore[attr-defined]

    def ranges(self, rows: int) -> list[tuple[int, int]]:
        """Return (first, last + 1) of this rank's row ranges in a whole parameter with `rows` rows, in order."""
        if self.dim != 0:
            return [(0, rows)]
        unit = rows // sum(self.sections)
        ranges = []
        for end, section in zip(accumulate(self.sections), self.sections, strict=True):
            part = section * unit // self.ranks
            first = (end - section) * unit + self.rank * part
            ranges.append((first, first + part))
        return ranges

    def columns(self, width: int) -> tuple[int, int] | None:
        """Return (first, last + 1) of this rank's columns in a whole parameter with `width` columns; None for all."""
        if self.dim != 1:
            return None
        return self.rank * width // self.ranks, (self.rank + 1) * width // self.ranks


class CutOverHeads:
    """Base of modules whose parameters have parts of all heads, which tensor-parallel ranks cut."""

    tp_group: ProcessGroup

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Return the parameters as parts of those of all heads, as Megatron-Core's method."""
        group = ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"]
        state = self.state_dict(prefix="", keep_vars=True)  # type: ignore[attr-defined]
        return make_sharded_tensors_for_checkpoint(
            state, prefix, dict.fromkeys(state, 0), sharded_offsets, tp_group=self.tp_group, dp_cp_group=group
        )


_EXPERT_NUMBER = re.compile(r"(?<=\blocal_experts\.)\d+|(?<=\bweight)\d+$|(?<=\bbias)\d+$")
"""Matches the expert's number in a parameter's name: `local_experts.3.linear_fc1.weight`, `linear_fc1.weight3`."""

_EMBEDDING, _TIED = "embedding.word_embeddings.weight", "output_layer.weight"


def modules_of(chunks: list[MegatronModule]) -> dict[str, list[MegatronModule]]:
    """Return the chunks of every module on this rank: those of `MimoModel`s, or of the plain GPT as `language`."""
    if not chunks:
        return {}
    if not isinstance(chunks[0], MimoModel):
        return {LANGUAGE: list(chunks)}
    modules = {name: [module] for name, module in chunks[0].modality_submodules.items()}
    if chunks[0].language_model is not None:
        modules[LANGUAGE] = [model.language_model for model in chunks]
    return modules


def global_names(chunk: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of a model chunk, wrapped or not, by their names in the whole module."""
    model = unwrap_model(chunk)
    names = {global_name(model, name): parameter for name, parameter in model.named_parameters()}
    if getattr(model, "share_embeddings_and_output_weights", False) and _TIED in names:
        names[_EMBEDDING] = names.pop(_TIED)
    return names


def router_biases(chunk: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the biases of routers of a model chunk by their names in the whole module. They are buffers that
    directories have."""
    model = unwrap_model(chunk)
    buffers = model.named_buffers()
    return {global_name(model, name): buffer for name, buffer in buffers if name.endswith(".router.expert_bias")}


def tensor_names(chunk: torch.nn.Module) -> dict[int, str]:
    """Return the names of parameters and buffers of a model chunk in the whole module, by `id`."""
    model = unwrap_model(chunk)
    names = {id(buffer): global_name(model, name) for name, buffer in model.named_buffers()}
    return names | {id(parameter): name for name, parameter in global_names(chunk).items()}


def layers_of(module: torch.nn.Module, name: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield (name, layer): entries of lists of layers, and modules outside such lists. A layer's name is the prefix of
    its parameters' names in `global_names`."""
    for key, child in module.named_children():
        if isinstance(child, TransformerLayer):
            key = child.layer_number - 1
        path = f"{name}.{key}".removeprefix(".").removeprefix("module.")
        is_list = isinstance(module, torch.nn.ModuleList)
        if is_list or not any(isinstance(part, (torch.nn.ModuleList, torch.nn.ModuleDict)) for part in child.modules()):
            yield path, child
        else:
            yield from layers_of(child, path)


def global_name(module: torch.nn.Module, name: str) -> str:
    """Return the name of a parameter or a submodule in the whole module, from its name in this rank's part of it."""
    parts, first_expert = name.split("."), 0
    for number, part in enumerate(parts):
        ep_group, experts = getattr(module, "ep_group", None), getattr(module, "num_local_experts", 0)
        if ep_group is not None and experts:
            first_expert = ep_group.rank() * experts
        module = getattr(module, part)
        if isinstance(module, TransformerLayer):
            parts[number] = str(module.layer_number - 1)
    return _EXPERT_NUMBER.sub(lambda match: str(int(match[0]) + first_expert), ".".join(parts))


@contextmanager
def gathered(model: list[MegatronModule]) -> Iterator[None]:
    """Complete the gathering at the start of the block, so that parameters are current inside it. Collective if modules
    overlap."""
    hooked = [*overlapping_chunks(model)]
    for chunk in hooked:
        chunk.disable_forward_pre_hook(param_sync=True)
    try:
        yield
    finally:
        for chunk in hooked:
            chunk.enable_forward_pre_hook()


def overlapping_chunks(model: list[MegatronModule]) -> Iterator[DistributedDataParallel]:
    """Yield the wrapped chunks of this rank whose parameters are gathered while they compute."""
    for chunks in modules_of(model).values():
        for chunk in chunks:
            if getattr(chunk, "use_forward_hook", False):
                yield chunk


_TRANSFORMER_ENGINE = "megatron.core.extensions.transformer_engine"
_whole = layers._initialize_affine_weight_cpu


def draw_by(config: TransformerConfig) -> None:
    """Let the layers of a config draw their weights from `Normal`, with Megatron-Core's deviations."""
    config.init_method = config.embedding_init_method = Normal(config.init_method_std)
    config.output_layer_init_method = Normal(config.init_method_std / (2 * config.num_layers) ** 0.5)


@contextmanager
def drawn_in_parts() -> Iterator[None]:
    """Let layers built in the block draw only their own parts, or nothing without `config.perform_initialization`."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(layers, _whole.__name__, _draw_part))
        if engine := sys.modules.get(_TRANSFORMER_ENGINE):
            stack.enter_context(patch.object(engine, _whole.__name__, _draw_part))
            stack.enter_context(patch.object(engine, "condition_init_method", _if_drawn))
        yield


def _draw_part(
    weight: torch.Tensor,
    output_size: int,
    input_size: int,
    per_partition_size: int,
    partition_dim: int,
    init_method: Callable[[torch.Tensor], Any],
    stride: int = 1,
    return_master_weight: bool = False,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    skip_set_tensor_parallel_attributes: bool = False,
    **others: Any,
) -> torch.Tensor | None:
    """Replace `_initialize_affine_weight_cpu`; `stride` is a number of pieces that are each cut."""
    draws_parts = isinstance(init_method, Normal) and not return_master_weight
    if init_method is not _nothing and not (draws_parts and rank is not None):
        options = {"rank": rank, "world_size": world_size, **others}
        options["skip_set_tensor_parallel_attributes"] = skip_set_tensor_parallel_attributes
        sizes = (output_size, input_size, per_partition_size)
        return _whole(weight, *sizes, partition_dim, init_method, stride, return_master_weight, **options)
    if not skip_set_tensor_parallel_attributes:
        set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=partition_dim, stride=stride)
    if isinstance(init_method, Normal):
        assert rank is not None and world_size is not None
        init_method.draw_part(weight, partition_dim, rank, world_size, stride)
    return None


def _if_drawn(config: TransformerConfig, init_method: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """Replace `condition_init_method` in layers of Transformer Engine."""
    return init_method if config.perform_initialization else _nothing


def _nothing(weight: torch.Tensor) -> None:
    """Leave a weight as it is."""


def load_start_weights(model: list[MegatronModule]) -> bool:
    """Let every plain encoder of this rank load its weights. Return True if there is any: an optimizer with master
    copies must read the weights again.

    Raises:
        UserError: an encoder's weights cannot be loaded.
    """
    plain = [
        encoder
        for name, (module, *_) in modules_of(model).items()
        if name != LANGUAGE
        for encoder in unwrap_model(module).encoders.values()
        if isinstance(encoder, PlainEncoder)
    ]
    try:
        for encoder in plain:
            encoder.load_weights()
    except EncoderError as error:
        raise UserError(str(error)) from error
    return bool(plain)
