"""Matmuls of transformer layers in fp8. Transformer Engine computes them, and Megatron-Core enables them layer by layer
(0.19.2, fp8_utils.py: `get_fp8_context`). Weights stay in the run's precision. Each layer caches an fp8 copy of its
weights until they may have changed, see `renew_copies`."""

from collections.abc import Callable, Iterable
from functools import wraps

import torch
import torch.nn.functional as F
from megatron.core.fp8_utils import is_first_last_bf16_layer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from mimo_train.config.errors import UserError
from mimo_train.config.schema import ConfigContainer
from mimo_train.layout.kernels import fp8_unit, has_fp8


def require_fp8(cfg: ConfigContainer, te: bool) -> None:
    """Raise UserError if a module has fp8 and no Transformer Engine (`te`), whose absence would go unnoticed."""
    for name, recipe in has_fp8(cfg).items():
        key = f"modules.{name}.fp8" if cfg.modules[name].fp8 else "train.fp8"
        if not te:
            raise UserError(
                f"{key}: fp8 ({recipe}) requires CUDA and Transformer Engine. Install mimo-train[gpu] and train on a "
                f"GPU, or set {key}=none"
            )


def prepare_layer(layer: TransformerLayer) -> None:
    """Let the matmuls of a layer with fp8 take any number of rows. fp8 matmuls take multiples of 16 rows (mxfp8: 32;
    the gradient of a weight is summed over them). Images and texts have any number, so rows of zeros are added and
    removed after the matmul."""
    config: TransformerConfig = layer.config
    if not config.fp8 or is_first_last_bf16_layer(config, layer.layer_number - 1):
        return
    attention, blocks = layer.self_attention, [layer.mlp]
    if isinstance(layer.mlp, MoELayer):
        # Experts pad their own rows, each expert its tokens (0.19.2, moe/experts.py: `quantization_padding`).
        blocks = [] if layer.mlp.shared_experts is None else [layer.mlp.shared_experts]
    of_blocks = [linear for block in blocks for linear in (block.linear_fc1, block.linear_fc2)]
    names = ("linear_qkv", "linear_proj") if hasattr(attention, "linear_qkv") else ("in_proj", "out_proj")
    for linear in (*(getattr(attention, name) for name in names), *of_blocks):
        # `plan.fp8` has rejected other layers.
        assert not isinstance(linear, ColumnParallelLinear | RowParallelLinear), f"{type(linear)} has no fp8"
        linear.forward = _of_whole_units(linear.forward, fp8_unit(config.fp8_recipe), config.sequence_parallel)


def renew_copies(chunks: Iterable[torch.nn.Module]) -> None:
    """Let layers renew their fp8 copies at the next microbatch, because weights may have changed. Megatron-Core's
    `set_is_first_microbatch` reads the config of the whole model, which is the language model's. An encoder with fp8
    next to a language model without it would keep the copies of its first step (0.19.2, transformer/module.py:105)."""
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "is_first_microbatch"):
                module.is_first_microbatch = True  # type: ignore[assignment]


def _of_whole_units(forward: Callable, unit: int, gathers: bool) -> Callable:
    """Return a linear layer's pass, [..., width] -> ([..., other width], bias), on a multiple of `unit` rows. `gathers`
    is true if sequence-parallel ranks each have a part of the rows."""

    @wraps(forward)
    def padded(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        leading = inputs.shape[:-1]
        missing = -leading.numel() % unit
        if not missing:
            return forward(inputs)
        # Padding would come between the parts of the ranks; sizes are such that there is none (`plan.fp8.row_unit`).
        assert not gathers, f"{leading.numel()} rows of a sequence-parallel rank are no multiple of {unit}"
        output, bias = forward(F.pad(inputs.flatten(0, -2), (0, 0, 0, missing)))
        return output[:-missing].view(*leading, -1), bias

    return padded
