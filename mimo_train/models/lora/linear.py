"""Low-rank adapters next to Megatron-Core's parallel linear layers (LoRA, Hu et al. 2021, arXiv 2106.09685).

y = W x + scale * B A x, with W frozen and scale alpha / rank, or alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732). A is
drawn whole, from (seed, module, layer, name of the linear layer or projection), and cut as W is. B starts at zero, so a
run starts with the numbers of the model without adapters. The parameters are `lora_a` [rank, input size] and `lora_b`
[output size, rank] next to `weight`, which keeps its name, so checkpoints without adapters fit. The adapter of a
projection inside a fused layer has its parameters one name deeper, as in `linear_qkv.q_proj.lora_a`.

DoRA (arXiv 2402.09353): y = g * (W + scale * B A) x, with g = m / |W + scale * B A| for every output row. m,
`lora_magnitude` [output size], is trained. Backward treats the norm as a constant (section 4.3). m starts as the norm,
so that g is 1.

A x has only `rank` numbers for each token, and tensor parallelism communicates nothing wider:
- column-parallel: B and m are cut like W, A is whole. With sequence parallelism A x is gathered along the sequence.
- row-parallel: A is cut like W, B and m are whole. A x is summed over ranks and, with sequence parallelism, cut again.
  Squares of rows are summed over ranks.

Shape suffixes: S sequence, B batch, R rank (of all projections together), O output size (this rank's part if it is
cut).
"""

import math
from collections.abc import Collection, Iterator
from contextlib import nullcontext
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
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from mimo_train.config.schema_modules import LoraConfig
from mimo_train.layout.adapters import WHOLE, AdaptedLinear, Linear
from mimo_train.models.lora.quantized import Quantizable, in_sections
from mimo_train.models.lora.rows import FusedRows
from mimo_train.models.parameters import Cut, mark, seed_for


class Adaptable(Quantizable):
    """Base of the two linear layers that can be adapted. Without `add_adapters` they are Megatron-Core's."""

    lora: LoraConfig | None = None
    linear: Linear
    column: bool
    # Attributes of the parallel linear layer that this is mixed into.
    config: TransformerConfig
    input_size: int
    sequence_parallel: bool
    skip_bias_add: bool
    tp_group: dist.ProcessGroup
    training: bool
    weight: torch.Tensor

    def add_adapters(self, adapted: AdaptedLinear, lora: LoraConfig, seed: int) -> None:
        """Create A and B from the layer's `seed`, and with DoRA magnitudes of 1, which `start_magnitudes` sets."""
        self.lora, self.linear = lora, adapted.linear
        self._rows = FusedRows(adapted.linear, self.tp_group.size())
        self._adapters: dict[str, Any] = {
            name: self if name == WHOLE else torch.nn.Module() for name in adapted.projections
        }
        # The bias is added after the magnitudes.
        self._adds_bias = lora.dora and not self.skip_bias_add
        self.skip_bias_add = self.skip_bias_add or lora.dora
        for name, holder in self._adapters.items():
            if name != WHOLE:
                self.add_module(name, holder)  # type: ignore[attr-defined]  # a torch module, which this is mixed into
            self._add_adapter(holder, name, seed)

    def _add_adapter(self, holder: Any, name: str, seed: int) -> None:
        assert self.lora is not None
        rank, bound = self.lora.rank, 1 / math.sqrt(self.input_size)
        full = torch.empty(rank, self.input_size)
        target = name or self.linear.name.rpartition(".")[2]
        full.uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed_for(seed, "lora", target)))
        part = full if self.column else full.chunk(self.tp_group.size(), dim=1)[self.tp_group.rank()]
        dtype, rows = self.weight.dtype, self._rows.count(name)
        holder.lora_a = torch.nn.Parameter(part.to(dtype, copy=True).contiguous())
        holder.lora_b = torch.nn.Parameter(torch.zeros(rows, rank, dtype=dtype))
        if self.lora.dora:
            holder.lora_magnitude = torch.nn.Parameter(torch.ones(rows, dtype=dtype))
        for _, parameter, dim in self._named(holder):
            if self.linear.experts:
                mark(parameter, allreduce=False)
            if dim is not None:
                set_tensor_model_parallel_attributes(parameter, True, dim, 1)
            elif not self.linear.experts:
                # Each rank sees its part of the tokens: `finalize_model_grads` then sums over tensor-parallel ranks.
                mark(parameter, sequence_parallel=self.sequence_parallel)

    def _named(self, holder: Any) -> Iterator[tuple[str, torch.nn.Parameter, int | None]]:
        """Yield (name, parameter, dimension that tensor parallelism cuts) of one adapter."""
        yield "lora_a", holder.lora_a, None if self.column else 1
        yield "lora_b", holder.lora_b, 0 if self.column else None
        if self.lora is not None and self.lora.dora:
            yield "lora_magnitude", holder.lora_magnitude, 0 if self.column else None

    def named_adapters(self) -> Iterator[tuple[str, str, torch.nn.Parameter, int | None]]:
        """Yield (projection, name inside this layer, parameter, dimension that tensor parallelism cuts) of every
        adapter."""
        for projection, holder in self._adapters.items() if self.lora is not None else ():
            for name, parameter, dim in self._named(holder):
                yield projection, f"{projection}.{name}".removeprefix("."), parameter, dim

    def own_part(self, full: torch.Tensor, projection: str, dim: int | None) -> torch.Tensor:
        """Return this rank's part of a whole parameter that tensor parallelism cuts along `dim`."""
        tp, rank = self.tp_group.size(), self.tp_group.rank()
        if dim is None or tp == 1:
            return full
        if dim == 0:
            cut = Cut(0, self.linear.sections_of(projection), rank, tp)
            return torch.cat([full[first:last] for first, last in cut.ranges(len(full))])
        return full.chunk(tp, dim)[rank]

    def _hidden(self, inputs: torch.Tensor, cut: bool) -> torch.Tensor:
        """Return A x of all adapters together, [S, B, R], of this rank alone. All adapters share one dropout mask.
        `cut` is true if each tensor-parallel rank has a part of the inputs, and so its own mask."""
        assert self.lora is not None
        if self.training and self.lora.dropout:
            with get_cuda_rng_tracker().fork() if cut else nullcontext():
                inputs = F.dropout(inputs, self.lora.dropout)
        lora_a = torch.cat([holder.lora_a for holder in self._adapters.values()])
        return F.linear(inputs, self._summed(lora_a) if self.column else lora_a)

    def _summed(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return A of a column-parallel or B of a row-parallel layer, which every rank has whole. The ranks of an
        expert see the same tokens and have a part of the gradient each, which backward sums here; the dispatcher sums
        their activations."""
        if self.linear.experts and self.tp_group.size() > 1:
            return copy_to_tensor_model_parallel_region(parameter, group=self.tp_group)
        return parameter

    def _adapted(
        self, output_SBO: torch.Tensor, bias: torch.Tensor | None, hidden_SBR: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the layer's output and bias with adapters, from those without and A x."""
        assert self.lora is not None
        pieces = zip(self._adapters.items(), hidden_SBR.split(self.lora.rank, -1), strict=True)
        deltas = {
            name: F.linear(piece, holder.lora_b if self.column else self._summed(holder.lora_b))
            for (name, holder), piece in pieces
        }
        output_SBO = torch.add(output_SBO, self._rows.join(deltas, dim=-1, fill=0.0), alpha=self.lora.scale)
        if self.lora.dora:
            output_SBO = self._gain().to(output_SBO.dtype) * output_SBO
        if self._adds_bias:
            return (output_SBO if bias is None else output_SBO + bias), None
        return output_SBO, bias

    @torch.no_grad()
    def _adapted_weight(self) -> torch.Tensor:
        """Return this rank's part of W + scale * B A, in fp32."""
        assert self.lora is not None
        products = {name: adapter.lora_b.float() @ adapter.lora_a.float() for name, adapter in self._adapters.items()}
        return self.full_weight(torch.float32) + self.lora.scale * self._rows.join(products, dim=0, fill=0.0)

    @torch.no_grad()
    def _norms(self) -> torch.Tensor:
        """Return the norm of every row of the adapted weight, in the magnitudes' precision. Collective over
        tensor-parallel ranks of a row-parallel layer."""
        squares = self._adapted_weight().square().sum(dim=1)
        if not self.column and self.tp_group.size() > 1:
            dist.all_reduce(squares, group=self.tp_group)
        return squares.sqrt().to(self.config.params_dtype)

    def _gain(self) -> torch.Tensor:
        """Return DoRA's factor of each output, fp32; 1 for rows without an adapter."""
        norms = self._rows.split(self._norms().float(), self._adapters)
        gains = {name: adapter.lora_magnitude.float() / norms[name] for name, adapter in self._adapters.items()}
        return self._rows.join(gains, dim=0, fill=1.0)

    @torch.no_grad()
    def start_magnitudes(self, names: Collection[str]) -> None:
        """Set the magnitudes of `names` (inside this layer) to the norms that they divide by. Collective like
        `_norms`."""
        paths = {name: f"{name}.lora_magnitude".removeprefix(".") for name in self._adapters}
        chosen = {name: holder for name, holder in self._adapters.items() if paths[name] in names}
        if chosen:
            norms = self._rows.split(self._norms(), chosen)
            for name, holder in chosen.items():
                holder.lora_magnitude.copy_(norms[name])

    def sharded_state_dict(self, prefix: str, sharded_offsets: tuple, metadata: dict[str, Any]) -> dict[str, Any]:
        # The method of the linear layer, which follows this class in the MRO.
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        if self.lora is None:
            return state
        adapters = {name: parameter for _, name, parameter, _ in self.named_adapters()}
        cut = {name: dim for _, name, _, dim in self.named_adapters() if dim is not None}
        # A weight is stored as one tensor of all layers. Adapters of only some layers would leave gaps in it.
        number = "" if self.linear.layer is None else f"layer_{self.linear.layer}."
        stored = make_sharded_tensors_for_checkpoint(adapters, f"{prefix}{number}", cut, (), **groups)
        for projection, name, _, dim in self.named_adapters():
            state[prefix + name] = stored[f"{prefix}{number}{name}"]
            sections = self.linear.sections_of(projection)
            if dim == 0 and len(sections) > 1:
                state[prefix + name] = in_sections(state[prefix + name], sections, self.tp_group.size())
        return state

    @torch.no_grad()
    def merged_weight(self) -> torch.Tensor:
        """Return this rank's part of the weight with its adapters, in fp32. Collective like `_norms`."""
        assert self.lora is not None
        adapted = self._adapted_weight()
        return self._gain()[:, None] * adapted if self.lora.dora else adapted

    @torch.no_grad()
    def merge(self) -> None:
        """Merge the adapters into the weight, and reset them so that they change nothing. Those next to a quantized
        weight, which would be rounded again, stay. Collective like `_norms`."""
        if self.lora is None or self.is_quantized:
            return
        self.weight.copy_(self.merged_weight())
        for holder in self._adapters.values():
            holder.lora_b.zero_()
        if self.lora.dora:
            self.start_magnitudes([name for _, name, _, _ in self.named_adapters()])


class LoraColumnParallelLinear(Adaptable, ColumnParallelLinear):
    """`ColumnParallelLinear` that can have adapters."""

    column = True

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map [S, B, input size] to ([S, B, O], bias or None)."""
        if self.lora is None:
            return super().forward(input_, weight, runtime_gather_output)
        output_SBO, bias = super().forward(input_, weight, False)
        hidden_SBR = self._hidden(input_, cut=self.sequence_parallel)
        if self.linear.experts:
            pass  # its tokens have been gathered
        elif self.sequence_parallel:
            hidden_SBR = gather_from_sequence_parallel_region(hidden_SBR, group=self.tp_group)
        else:
            hidden_SBR = copy_to_tensor_model_parallel_region(hidden_SBR, group=self.tp_group)
        output_SBO, bias = self._adapted(output_SBO, bias, hidden_SBR)
        if self.gather_output if runtime_gather_output is None else runtime_gather_output:
            output_SBO = gather_from_tensor_model_parallel_region(output_SBO, group=self.tp_group)
        return output_SBO, bias


class LoraRowParallelLinear(Adaptable, RowParallelLinear):
    """`RowParallelLinear` that can have adapters."""

    column = False

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map [S, B, this rank's part of the input size] to ([S, B, O], bias or None)."""
        output_SBO, bias = super().forward(input_)
        if self.lora is None:
            return output_SBO, bias
        hidden_SBR = self._hidden(input_, cut=True)
        if self.linear.experts:
            pass  # the dispatcher sums outputs
        elif self.sequence_parallel:
            hidden_SBR = reduce_scatter_to_sequence_parallel_region(hidden_SBR, group=self.tp_group)
        else:
            hidden_SBR = reduce_from_tensor_model_parallel_region(hidden_SBR, group=self.tp_group)
        return self._adapted(output_SBO, bias, hidden_SBR)


def linear_classes(adapted: bool) -> tuple[type, type]:
    """Return the column- and the row-parallel linear layer, adaptable or Megatron-Core's own."""
    if adapted:
        return LoraColumnParallelLinear, LoraRowParallelLinear
    return ColumnParallelLinear, RowParallelLinear
