"""Frozen weights of linear layers in 4 bits (QLoRA, Dettmers et al. 2023, arXiv 2305.14314): NF4 of bitsandbytes
(0.50.2).

A weight [O, I] is two tensors: `weight` [O, I / 2] with two numbers in a byte, and `weight_scales` [O, I / BLOCK], the
largest magnitude of each block of BLOCK numbers. bitsandbytes has blocks of a flattened weight. As BLOCK divides I, and
a rank's part of I (`layout.adapters`), these are the blocks of rows here, at any layout, also of fused projections.
Quantizing a dequantized fp32 weight again gives the same bytes: the largest number of a block is 1 or -1 times its
scale.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from mimo_train.config.errors import UserError
from mimo_train.config.schema_modules import BLOCK
from mimo_train.models.blocks.base import Linear
from mimo_train.models.parameters import mark


def _functional() -> Any:
    try:
        from bitsandbytes import functional  # imports optional kernels
    except ImportError as error:
        raise UserError(
            f"lora.quantization: nf4 requires bitsandbytes ({error}). Install the extra qlora: pip install "
            "'mimo-train[qlora]'"
        ) from error
    return functional


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight [O, I] as (packed [O, I / 2] uint8, scales [O, I / BLOCK] fp32)."""
    packed, state = _functional().quantize_4bit(weight.contiguous(), blocksize=BLOCK, quant_type="nf4")
    return packed.view(len(weight), -1), state.absmax.view(len(weight), -1)


def dequantize(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight [O, I] of (packed, scales)."""
    functional, shape = _functional(), (len(packed), 2 * packed.size(1))
    state = functional.QuantState(
        absmax=scales.reshape(-1),
        shape=torch.Size(shape),
        code=functional.get_4bit_type("nf4", device=packed.device),
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=dtype,
    )
    return functional.dequantize_4bit(packed.reshape(-1, 1), state).view(shape)


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight as it is after quantization, in its dtype."""
    return dequantize(*quantize(weight), weight.dtype)


def dequantized_tensor(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a weight of a directory that bitsandbytes quantized, in fp32.

    Args:
        tensors: the packed weight as `weight`, and the others by the ends of their names, as `QuantState.from_dict`
            expects them.
    """
    functional, packed = _functional(), tensors.pop("weight")
    state = functional.QuantState.from_dict(tensors, device=torch.device("cpu"))
    state.dtype = torch.float32
    return functional.dequantize_4bit(packed, state)


def in_sections(sharded: Any, sections: tuple[int, ...], ranks: int) -> Any:
    """Return a sharded tensor of which each of `ranks` has a part of every section, cut as the weight (mlp.py:371)."""
    sizes = [size // ranks for size in sections]
    return _split_tensor_factory(sharded, sizes, [str(section) for section in range(len(sizes))], 0)


class Quantizable:
    """Base of linear layers whose weight can be quantized. Until `quantize` they are as without it."""

    weight_scales: torch.Tensor
    """Scales of a quantized weight; others have none."""
    linear: Linear
    column: bool
    # Attributes of the parallel linear layer that this is mixed into.
    config: TransformerConfig
    tp_group: dist.ProcessGroup
    weight: torch.Tensor

    @property
    def is_quantized(self) -> bool:
        """True if the weight is quantized."""
        return hasattr(self, "weight_scales")

    @torch.no_grad()
    def quantize(self, linear: Linear, has_values: bool) -> None:
        """Keep the weight in 4 bits. Without `has_values` none were drawn, and a checkpoint follows."""
        self.linear, weight = linear, self.weight
        if has_values:
            packed, scales = quantize(weight)
        else:
            rows, inputs = weight.shape
            packed = torch.empty(rows, inputs // 2, dtype=torch.uint8)
            scales = torch.empty(rows, inputs // BLOCK)
        for name, value in (("weight", packed), ("weight_scales", scales)):
            parameter = torch.nn.Parameter(value, requires_grad=False)
            mark(parameter, **vars(weight))  # how tensor parallelism has cut it
            setattr(self, name, parameter)

    def full_weight(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return this rank's weight, dequantized to `dtype`; None: the dtype of the model's parameters."""
        if not self.is_quantized:
            return self.weight if dtype is None else self.weight.to(dtype)
        return dequantize(self.weight, self.weight_scales, dtype or self.config.params_dtype)

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        # The method of the linear layer, to which the weight of a quantized one is given anew in backward.
        product = super()._forward_impl  # type: ignore[misc]
        if not self.is_quantized:
            return product(input, weight, *args, **options)
        full = self.full_weight()
        storage, shape = full.untyped_storage()._cdata, full.shape  # tensors of a dry run have no address

        def pack(tensor: torch.Tensor) -> torch.Tensor | None:
            return None if tensor.untyped_storage()._cdata == storage and tensor.shape == shape else tensor

        def unpack(saved: torch.Tensor | None) -> torch.Tensor:
            return self.full_weight() if saved is None else saved

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return product(input, full, *args, **options)

    def sharded_state_dict(self, prefix: str, sharded_offsets: tuple, metadata: dict[str, Any]) -> dict[str, Any]:
        # The method of the linear layer, which follows this class in the MRO.
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        if not self.is_quantized:
            return state
        name, dim = "weight_scales", 0 if self.column else 1
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        scales = {name: self.weight_scales}
        state |= make_sharded_tensors_for_checkpoint(scales, prefix, {name: dim}, sharded_offsets, **groups)
        sections = self.linear.sections_of()
        if dim == 0 and len(sections) > 1:
            state[prefix + name] = in_sections(state[prefix + name], sections, self.tp_group.size())
        return state
