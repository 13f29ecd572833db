"""Low-rank adapters beside Megatron-Core's parallel linear layers (Hu et al. 2021, arXiv 2106.09685).

y = W x + (alpha / rank) * B A x, with W frozen. A is drawn as a function of (seed, module, layer, name of the linear
layer) alone, whole, and cut as W is; B begins at zero, so that a run begins with the numbers of the model without
adapters. The parameters are `lora_a` [rank, input size] and `lora_b` [output size, rank] beside `weight`, which keeps
its name: checkpoints of the model without adapters fit.

A x has only `rank` numbers for each token, and tensor parallelism communicates nothing wider than that:

- column-parallel: B is cut like W, A is whole. With sequence parallelism A x is gathered along the sequence.
- row-parallel: A is cut like W, B is whole. A x is summed over ranks, with sequence parallelism and cut again.

Shape suffixes: S sequence, B batch, R rank, O output size (this rank's part of it where it is cut).
"""

import math
from contextlib import nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from mimo_train.config.parts import ADAPTERS, is_adapter
from mimo_train.config.schema_modules import LoraConfig
from mimo_train.model.marks import mark
from mimo_train.model.seeds import seed_for


class _Adapter:
    """Base of the two adapted linear layers."""

    lora: LoraConfig
    # What the parallel linear layer has that this is mixed into.
    config: TransformerConfig
    input_size: int
    sequence_parallel: bool
    tp_group: dist.ProcessGroup
    training: bool
    weight: torch.Tensor

    def _add_adapter(self, target: str, lora: LoraConfig, cut: dict[str, int]) -> None:
        """Create A and B. `cut` maps the one that tensor parallelism cuts to its dimension."""
        self.lora, self._target, self._cut = lora, target, cut
        width, scale = self.input_size, 1 / math.sqrt(self.input_size)
        whole = torch.empty(lora.rank, width)
        # The global generator was seeded for this layer (`SeededTransformerLayer`), and is not changed here.
        generator = torch.Generator().manual_seed(seed_for(torch.initial_seed(), "lora", target))
        whole.uniform_(-scale, scale, generator=generator)
        rows, columns = self.weight.shape
        part = whole.split(columns, dim=1)[self.tp_group.rank() if "lora_a" in cut else 0]
        dtype = self.weight.dtype
        self.lora_a = torch.nn.Parameter(part.to(dtype, copy=True).contiguous())
        self.lora_b = torch.nn.Parameter(torch.zeros(rows, lora.rank, dtype=dtype))
        for name, dim in cut.items():
            set_tensor_model_parallel_attributes(getattr(self, name), True, dim, 1)
        for name in set(ADAPTERS) - set(cut):
            # Each rank sees its part of the tokens: `finalize_model_grads` then sums over the tensor-parallel ranks.
            mark(getattr(self, name), sequence_parallel=self.sequence_parallel)

    @property
    def _scale(self) -> float:
        return self.lora.alpha / self.lora.rank

    def _dropped(self, inputs: torch.Tensor, cut: bool) -> torch.Tensor:
        """The inputs after dropout. `cut`: whether a tensor-parallel rank has a part of them, and so its own mask."""
        if not (self.training and self.lora.dropout):
            return inputs
        with get_cuda_rng_tracker().fork() if cut else nullcontext():
            return F.dropout(inputs, self.lora.dropout)

    def sharded_state_dict(self, prefix: str, sharded_offsets: tuple, metadata: dict[str, Any]) -> dict[str, Any]:
        # The linear layer's, which comes behind this class.
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        own = {name: getattr(self, name) for name in ADAPTERS}
        state |= make_sharded_tensors_for_checkpoint(own, prefix, self._cut, sharded_offsets, **groups)
        if self._target == "linear_fc1" and self.config.gated_linear_unit:
            # Its outputs are two halves, of each of which a rank has a part; as for the weight (mlp.py:371).
            key = f"{prefix}lora_b"
            state[key] = apply_swiglu_sharded_factory(
                state[key], sharded_offsets, tp_group=self.tp_group, dp_group=metadata["dp_cp_group"]
            )
        return state

    @torch.no_grad()
    def merge(self) -> None:
        """Add the adapter to the weight, and reset it to zero."""
        self.weight += (self._scale * self.lora_b.float() @ self.lora_a.float()).to(self.weight.dtype)
        self.lora_b.zero_()


class LoraColumnParallelLinear(_Adapter, ColumnParallelLinear):
    """`ColumnParallelLinear` with an adapter."""

    def __init__(self, *arguments: Any, lora: LoraConfig, target: str, **options: Any):
        super().__init__(*arguments, **options)
        self._add_adapter(target, lora, {"lora_b": 0})

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[S, B, input size] -> ([S, B, O], bias or None)."""
        output_SBO, bias = super().forward(input_, weight, runtime_gather_output)
        hidden_SBR = F.linear(self._dropped(input_, cut=self.sequence_parallel), self.lora_a)
        if self.sequence_parallel:
            hidden_SBR = gather_from_sequence_parallel_region(hidden_SBR, group=self.tp_group)
        else:
            hidden_SBR = copy_to_tensor_model_parallel_region(hidden_SBR, group=self.tp_group)
        return output_SBO + self._scale * F.linear(hidden_SBR, self.lora_b), bias


class LoraRowParallelLinear(_Adapter, RowParallelLinear):
    """`RowParallelLinear` with an adapter."""

    def __init__(self, *arguments: Any, lora: LoraConfig, target: str, **options: Any):
        super().__init__(*arguments, **options)
        self._add_adapter(target, lora, {"lora_a": 1})

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[S, B, this rank's part of the input size] -> ([S, B, O], bias or None)."""
        output_SBO, bias = super().forward(input_)
        hidden_SBR = F.linear(self._dropped(input_, cut=True), self.lora_a)
        if self.sequence_parallel:
            hidden_SBR = reduce_scatter_to_sequence_parallel_region(hidden_SBR, group=self.tp_group)
        else:
            hidden_SBR = reduce_from_tensor_model_parallel_region(hidden_SBR, group=self.tp_group)
        return output_SBO + self._scale * F.linear(hidden_SBR, self.lora_b), bias


class LoraLinear:
    """Builds one of a layer's linear layers, with an adapter if the config has one for it."""

    def __init__(self, target: str, plain: type, adapted: type):
        """`plain` or `adapted` is what it builds; the config it is given has the `LoraConfig` as `lora`."""
        self._target, self._plain, self._adapted = target, plain, adapted

    def __call__(self, *arguments: Any, config: TransformerConfig, **options: Any) -> torch.nn.Module:
        lora: LoraConfig = config.lora
        if not lora.rank or self._target not in lora.targets:
            return self._plain(*arguments, config=config, **options)
        return self._adapted(*arguments, config=config, lora=lora, target=self._target, **options)


def column(target: str) -> LoraLinear:
    """Builder of a column-parallel linear layer of this name."""
    return LoraLinear(target, ColumnParallelLinear, LoraColumnParallelLinear)


def row(target: str) -> LoraLinear:
    """Builder of a row-parallel linear layer of this name."""
    return LoraLinear(target, RowParallelLinear, LoraRowParallelLinear)


def freeze_base(chunks: list[torch.nn.Module], part: str) -> None:
    """Stop the gradients of everything but adapters.

    Args:
        chunks: what this rank holds of one module, before data-parallel wrapping.
        part: shell pattern of the parameter names to freeze; other parameters are unchanged.
    """
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if fnmatchcase(name, part) and not is_adapter(name):
                parameter.requires_grad_(False)


def merge_lora(model: list[torch.nn.Module]) -> None:
    """Add every adapter of the model chunks to its weight, so that the weights alone give the model's numbers (in bf16
    and fp16 to the precision of a weight). The adapters are reset to zero."""
    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, _Adapter):
                module.merge()
