"""Fused kernels of layers: Megatron-Core's options for them (`train.fusions`), and its gradient accumulation by torch's
matmul."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.fusions import fused_bias_geglu
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.tensor_parallel import layers as core_layers

from mimo_train.config.errors import UserError
from mimo_train.config.keys import is_installed
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_fusions import WITH_TRANSFORMER_ENGINE
from mimo_train.layout.fusions import fusions_of
from mimo_train.models.parameters import mark
from mimo_train.parallel import device

_ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "geglu": partial(F.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "quick_geglu": quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
    "swiglu": F.silu,
}


_FUSED = {"gelu_tanh": F.gelu, "geglu": F.gelu, "quick_geglu": fused_bias_geglu.quick_gelu}
"""The functions by which Megatron-Core selects other kernels."""


def activation_options(activation: str, fused: bool) -> dict[str, Any]:
    """Return Megatron-Core's options for an activation function. It selects kernels by the function: GELU's are of the
    tanh form whatever the function computes (fusions/fused_bias_geglu.py:15 in 0.19.2)."""
    function = _FUSED.get(activation, _ACTIVATIONS[activation]) if fused else _ACTIVATIONS[activation]
    return {"activation_func": function, "bias_activation_fusion": fused}


def fusion_options(cfg: ConfigContainer, name: str) -> dict[str, Any]:
    """Return Megatron-Core's options for the other fusions of a module.

    Raises:
        UserError: a kernel that the config requires is not installed.
    """
    reasons = fusions_of(cfg, name, device.current().type)
    for fusion in WITH_TRANSFORMER_ENGINE:
        required = not reasons[fusion] and getattr(cfg.train.fusions, fusion) == "always"
        if required and not is_installed("transformer_engine"):
            raise UserError(f"train.fusions.{fusion}: always requires Transformer Engine. Install it, or use auto")
    if not reasons["rotary"]:
        install_rotary()
    if not reasons["gradient_accumulation"]:
        install_gradient_accumulation()
    return {
        "bias_dropout_fusion": not reasons["bias_dropout"],
        "apply_rope_fusion": not reasons["rotary"],
        "gradient_accumulation_fusion": not reasons["gradient_accumulation"],
        "cross_entropy_loss_fusion": not reasons["cross_entropy"],
        "moe_permute_fusion": not reasons["moe_permute"],
        "moe_router_fusion": not reasons["moe_router"],
    }


def install_rotary() -> None:
    """Let Transformer Engine's kernel rotate only rows with the same positions: it reads one table of angles for all
    rows of a batch. Generation has prompts of several lengths, and Megatron-Core 0.19.2 has other operations for rows
    with three axes only (rope_utils.py:296)."""
    kernel = rope_utils.fused_apply_rotary_pos_emb
    if kernel is None or isinstance(kernel, partial):
        return
    rope_utils.fused_apply_rotary_pos_emb = partial(_rotate, kernel)


def _rotate(kernel: Callable, heads: torch.Tensor, angles: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    if angles.size(1) > 1:
        return rope_utils._apply_rotary_pos_emb_bshd(heads, angles, rotary_interleaved=interleaved)
    return kernel(heads, angles, interleaved=interleaved)


class WeightGradients:
    """The part of APEX's `fused_weight_gradient_mlp_cuda` that Megatron-Core 0.19.2 calls (tensor_parallel/
    layers.py:690), by torch's matmul, whose output may be wider than its inputs."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs_TI: torch.Tensor, gradient_TO: torch.Tensor, total_OI: torch.Tensor) -> None:
        """Add the gradient of a weight [O, I] to its fp32 total, from the inputs of T tokens and the gradients of their
        outputs."""
        if inputs_TI.dtype == total_OI.dtype:
            torch.addmm(total_OI, gradient_TO.t(), inputs_TI, out=total_OI)
        elif inputs_TI.is_cuda and _adds_wider(inputs_TI.device, inputs_TI.dtype):
            _add_matmul(total_OI, gradient_TO.t(), inputs_TI)
        else:
            total_OI.add_(gradient_TO.t().matmul(inputs_TI))


def _add_matmul(total: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
    torch.ops.aten.addmm.dtype_out(total, first, second, total.dtype, out=total)


@cache
def _adds_wider(place: torch.device, dtype: torch.dtype) -> bool:
    """True if a matmul of `dtype` can add to an fp32 tensor there, which not every version of cuBLAS does."""
    ones, total = torch.ones(16, 16, dtype=dtype, device=place), torch.ones(16, 16, device=place)
    try:
        _add_matmul(total, ones, ones)
    except RuntimeError:
        return False
    return True


def install_gradient_accumulation() -> None:
    """Let Megatron-Core's linear layers accumulate gradients by `WeightGradients`, unless APEX is installed."""
    if not core_layers._grad_accum_fusion_available:
        core_layers.fused_weight_gradient_mlp_cuda = WeightGradients
        core_layers._grad_accum_fusion_available = True


class FusedGradients(DistributedDataParallel):
    """Megatron-Core's wrapper, for weights whose matmul accumulates their gradient.

    Hooks on saved tensors (parts of `train.recompute`, `train.offload_activations`) lose the attributes of weights.
    Megatron-Core 0.19.2 then returns no gradient from the matmul (tensor_parallel/layers.py:692), and its wrapper stops
    a run whose reductions overlap (distributed_data_parallel.py:487).
    """

    def _make_backward_post_hook(self, param: torch.nn.Parameter) -> Callable[..., None]:
        original = super()._make_backward_post_hook(param)

        def hook(*unused: Any) -> None:
            if param.grad is None and param.requires_grad:
                param.grad = torch.zeros((), dtype=param.dtype, device=param.device).expand_as(param)
                mark(param, grad_added_to_main_grad=True)
            original(*unused)

        return hook
