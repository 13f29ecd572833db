"""A fake Transformer Engine, for tensors without memory and machines without a GPU.

`install` replaces the package before Megatron-Core is imported. It has what Megatron-Core 0.19.2 extends
(extensions/transformer_engine.py): constructors that take only keywords of version 2.20.2, which the extra `gpu`
installs, and forward passes with the right shapes and messages. FLOPs are those of torch's layers. Memory is close to
theirs, since what the real kernels keep is unknown here. Values in fp8 are not rounded. Attention over context-parallel
ranks sends nothing, and counts a packed row as one text.

Shape suffixes: S sequence, B batch, N heads, D head dimension; T positions of a packed row.
"""

import importlib.machinery
import sys
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.nn import Parameter
from torch.nn.init import ones_, zeros_
from torch.utils import checkpoint as recompute

from mimo_train.preflight.dry_run.fake_fp8 import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    Fp8Padding,
    Fp8Unpadding,
    Fp8Weight,
    MXFP8BlockScaling,
    fp8_autocast,
    supported,
)

VERSION = "2.20.2"
"""Megatron-Core selects code paths by it."""
PACKED = ("qkv_format", *(f"{what}_{of}" for what in ("cu_seqlens", "max_seqlen") for of in ("q", "kv")),
          "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "pad_between_seqs", "num_splits",
          "core_attention_bias_type", "core_attention_bias")  # fmt: skip
"""Keywords of a forward pass of attention besides its inputs."""


class Unsupported:
    """A part of Transformer Engine that a dry run does not support."""

    def __init__(self, *_: Any, **__: Any):
        raise NotImplementedError("a dry run has no delayed scaling and no generators of Transformer Engine")


def checkpoint(
    function: Callable,
    *arguments: Any,
    distribute_saved_activations: bool,
    get_rng_state_tracker: Any,
    tp_group: Any,
) -> Any:
    """Replace `te.pytorch.distributed.checkpoint`, without generator states."""
    assert not distribute_saved_activations, "nobody asks for it"
    return recompute.checkpoint(function, *arguments, use_reentrant=True, preserve_rng_state=False)


class _Layer(torch.nn.Module):
    """A layer that takes the keywords in `OPTIONS`, with these defaults, and no others."""

    OPTIONS: ClassVar[dict[str, Any]] = {}
    fp8 = fp8_calibration = False

    def __init__(self, options: dict[str, Any]):
        super().__init__()
        if unknown := sorted(options.keys() - self.OPTIONS.keys()):
            raise TypeError(f"te.pytorch.{type(self).__name__} {VERSION} has no keyword {', '.join(unknown)}")
        self.options = SimpleNamespace(**self.OPTIONS | options)
        self.tp_group = getattr(self.options, "tp_group", None)
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}

    def parameter(self, shape: tuple[int, ...], init: Callable | None) -> Parameter:
        options = self.options
        weight = Parameter(torch.empty(shape, dtype=options.params_dtype, device=options.device))
        if init is not None:
            init(weight)
        return weight

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        self.tp_group = tp_group

    def get_extra_state(self) -> torch.Tensor:
        """Return an empty state, as with all recipes but delayed scaling."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Ignore the state, which is empty."""


class RMSNorm(_Layer):
    """`te.pytorch.RMSNorm`."""

    OPTIONS: ClassVar[dict[str, Any]] = {
        "eps": 1e-5, "sequence_parallel": False, "zero_centered_gamma": False, "params_dtype": None, "device": "cuda"
    }  # fmt: skip
    HAS_BIAS = False

    def __init__(self, normalized_shape: int, eps: float = 1e-5, **options: Any):
        super().__init__(options | {"eps": eps})
        self.eps, self.hidden_size = eps, normalized_shape
        self.weight = self.parameter((normalized_shape,), ones_)
        self.bias = self.parameter((normalized_shape,), zeros_) if self.HAS_BIAS else None
        for parameter in self.parameters():
            parameter.sequence_parallel = self.options.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return [..., hidden size], normalized."""
        return _norm(inputs, self.weight, self.bias, self.eps)


class LayerNorm(RMSNorm):
    """`te.pytorch.LayerNorm`."""

    HAS_BIAS = True


def _norm(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    if bias is None:
        return F.rms_norm(inputs, weight.shape, weight, eps)
    return F.layer_norm(inputs, weight.shape, weight, bias, eps)


_MATMUL_OPTIONS = {
    "sequence_parallel": False, "fuse_wgrad_accumulation": False, "tp_group": None, "tp_size": 1,
    "get_rng_state_tracker": None, "init_method": None, "bias": True, "return_bias": False, "params_dtype": None,
    "parallel_mode": None, "device": "cuda", "delay_wgrad_compute": False, "ub_overlap_ag": False,
    "ub_overlap_rs": False, "ub_name": None,
}  # fmt: skip
_LINEAR_OPTIONS = _MATMUL_OPTIONS | {
    "symmetric_ar_type": None, "ub_overlap_rs_dgrad": False, "ub_bulk_wgrad": False, "ub_bulk_dgrad": False
}  # fmt: skip


class _Matmul(_Layer):
    """A layer with weights of [out features, in features], split by its parallel mode."""

    def __init__(self, in_features: int, out_features: int, options: dict[str, Any]):
        super().__init__(options)
        self.parallel_mode, self.tp_size = self.options.parallel_mode, self.options.tp_size
        self.use_bias, self.return_bias = self.options.bias, self.options.return_bias
        self.sequence_parallel, self.save_original_input = self.options.sequence_parallel, False
        self.out_features = out_features // self.tp_size if self.parallel_mode == "column" else out_features
        self.in_features = in_features // self.tp_size if self.parallel_mode == "row" else in_features

    def weight_and_bias(self) -> tuple[Parameter, Parameter | None]:
        weight = self.parameter((self.out_features, self.in_features), self.options.init_method)
        return weight, self.parameter((self.out_features,), zeros_) if self.use_bias else None


class Linear(_Matmul):
    """`te.pytorch.Linear`: a matmul, with the messages of its parallel mode around it."""

    OPTIONS: ClassVar[dict[str, Any]] = _LINEAR_OPTIONS | {"rng_tracker_name": None}

    def __init__(self, in_features: int, out_features: int, **options: Any):
        super().__init__(in_features, out_features, options)
        self.weight, self.bias = self.weight_and_bias()
        self.fp8_weight = Fp8Weight()
        if self.parallel_mode == "row" and self.bias is not None:
            self.bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inputs: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Return [S, B, out features], with a separate bias if `return_bias`."""
        from megatron.core.tensor_parallel import mappings

        group, bias = self.tp_group, None if self.return_bias else self.bias
        weight = self.fp8_weight.of(self.weight, inputs, is_first_microbatch)
        if self.tp_size == 1 or self.parallel_mode is None:
            output = F.linear(inputs, weight, bias)
        elif self.parallel_mode == "column":
            if self.sequence_parallel:
                inputs = mappings.gather_from_sequence_parallel_region(inputs, group=group)
            else:
                inputs = mappings.copy_to_tensor_model_parallel_region(inputs, group=group)
            output = F.linear(inputs, weight, bias)
        else:
            output = F.linear(inputs, weight)
            if self.sequence_parallel:
                output = mappings.reduce_scatter_to_sequence_parallel_region(output, group=group)
            else:
                output = mappings.reduce_from_tensor_model_parallel_region(output, group=group)
            output = output if bias is None else output + bias
        return (output, self.bias) if self.return_bias else output


class LayerNormLinear(Linear):
    """`te.pytorch.LayerNormLinear`: a norm before the matmul."""

    OPTIONS: ClassVar[dict[str, Any]] = _LINEAR_OPTIONS | {
        "eps": 1e-5, "normalization": "LayerNorm", "zero_centered_gamma": False, "return_layernorm_output": False
    }  # fmt: skip

    def __init__(self, in_features: int, out_features: int, **options: Any):
        super().__init__(in_features, out_features, **options)
        assert not self.options.return_layernorm_output, "nobody asks for it"
        has_bias = self.options.normalization == "LayerNorm"
        self.layer_norm_weight = self.parameter((in_features,), ones_)
        self.layer_norm_bias = self.parameter((in_features,), zeros_) if has_bias else None
        for parameter in filter(None.__ne__, (self.layer_norm_weight, self.layer_norm_bias)):
            parameter.sequence_parallel = self.sequence_parallel  # type: ignore[union-attr]

    def forward(self, inputs: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Return [S, B, out features], see `Linear`."""
        normed = _norm(inputs, self.layer_norm_weight, self.layer_norm_bias, self.options.eps)
        return super().forward(normed, is_first_microbatch)


class GroupedLinear(_Matmul):
    """`te.pytorch.GroupedLinear`: matmuls of several experts, each with its rows."""

    OPTIONS: ClassVar[dict[str, Any]] = _MATMUL_OPTIONS | {
        "rng_tracker_name": None, "single_grouped_weight": False, "single_grouped_bias": False
    }  # fmt: skip

    def __init__(self, num_gemms: int, in_features: int, out_features: int, **options: Any):
        super().__init__(in_features, out_features, options)
        assert not self.options.single_grouped_weight and not self.options.single_grouped_bias, "nobody asks for it"
        self.num_gemms = num_gemms
        for expert in range(num_gemms):
            weight, bias = self.weight_and_bias()
            setattr(self, f"weight{expert}", weight)
            setattr(self, f"bias{expert}", bias)
        self.fp8_weights = [Fp8Weight() for _ in range(num_gemms)]

    def forward(self, inputs: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Any:
        """Return [rows, out features] from [rows, in features], with `m_splits` rows per expert."""
        outputs, biases = [], []
        for expert, rows in enumerate(inputs.split(m_splits)):
            weight = self.fp8_weights[expert].of(getattr(self, f"weight{expert}"), rows, is_first_microbatch)
            biases.append(getattr(self, f"bias{expert}"))
            outputs.append(F.linear(rows, weight, None if self.return_bias else biases[-1]))
        output = torch.cat(outputs)
        return (output, biases) if self.return_bias else output


class DotProductAttention(_Layer):
    """`te.pytorch.DotProductAttention`, as one fused kernel."""

    OPTIONS: ClassVar[dict[str, Any]] = {
        "num_gqa_groups": None, "attention_dropout": 0.0, "attn_mask_type": "causal", "window_size": None,
        "sequence_parallel": False, "tp_size": 1, "get_rng_state_tracker": None, "tp_group": None,
        "layer_number": None, "attention_type": "self", "cp_group": None, "cp_global_ranks": None, "cp_stream": None,
        "cp_comm_type": "p2p", "softmax_scale": None,
    }  # fmt: skip

    def __init__(self, num_attention_heads: int, kv_channels: int | tuple[int, int], **options: Any):
        super().__init__(options)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        attn_mask_type: str = "causal",
        **packed: Any,
    ) -> torch.Tensor:
        """Return [S, B, N * D] from [S, B, N, D], or [T, N * D] from [T, N, D] in a packed row."""
        assert attention_mask is None or attn_mask_type == "no_mask" or "causal" in attn_mask_type, attn_mask_type
        assert not set(packed) - set(PACKED), packed
        assert query.dtype == key.dtype == value.dtype, (query.dtype, key.dtype, value.dtype)
        is_row = query.dim() == 3
        if is_row:
            ends = packed["cu_seqlens_q"], packed["cu_seqlens_kv"]
            assert packed["qkv_format"] == "thd" and "padding" in attn_mask_type, (packed["qkv_format"], attn_mask_type)
            assert all(one.dtype == torch.int32 and one.device == query.device for one in ends), ends
        parts = (each.unsqueeze(1) if is_row else each for each in (query, key, value))
        query_BNSD, key_BNSD, value_BNSD = (part.permute(1, 2, 0, 3) for part in parts)
        context = F.scaled_dot_product_attention(
            query_BNSD,
            key_BNSD,
            value_BNSD,
            dropout_p=self.options.attention_dropout if self.training else 0.0,
            is_causal="causal" in attn_mask_type,
            scale=self.options.softmax_scale,
            enable_gqa=query_BNSD.size(1) != key_BNSD.size(1),
        )
        context = context.permute(2, 0, 1, 3).flatten(2)
        return context.squeeze(1) if is_row else context


def install() -> None:
    """Replace `transformer_engine` for the rest of this process.

    Raises:
        AssertionError: Megatron-Core is imported already, and has looked for it.
    """
    assert "megatron.core" not in sys.modules, "Megatron-Core has been imported"

    def package(name: str, **members: Any) -> types.ModuleType:
        module = types.ModuleType(name)
        module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None, is_package=True), []
        for key, member in members.items():
            setattr(module, key, member)
        sys.modules[name] = module
        return module

    recipe = package(
        "transformer_engine.common.recipe",
        DelayedScaling=Unsupported,
        Format=Format,
        Float8CurrentScaling=Float8CurrentScaling,
        Float8BlockScaling=Float8BlockScaling,
        MXFP8BlockScaling=MXFP8BlockScaling,
    )
    common = package("transformer_engine.common", recipe=recipe)
    checks = ("check_fp8_support", "check_fp8_block_scaling_support", "check_mxfp8_support")
    fp8 = package(
        "transformer_engine.pytorch.fp8",
        FP8GlobalStateManager=Unsupported,
        fp8_autocast=fp8_autocast,
        fp8_model_init=Unsupported,
        **dict.fromkeys(checks, supported),
    )
    package("transformer_engine.pytorch.tensor", QuantizedTensor=Unsupported)
    package("transformer_engine.pytorch.float8_tensor", Float8Tensor=Unsupported)
    distributed = package(
        "transformer_engine.pytorch.distributed",
        CudaRNGStatesTracker=Unsupported,
        activation_recompute_forward=Unsupported,
        checkpoint=checkpoint,
    )
    # Megatron-Core imports these names from version 2.7 on; routers are torch's without `moe_router_fusion`.
    fused = ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function")
    package("transformer_engine.pytorch.router", **dict.fromkeys(fused, Unsupported))
    layers = (Linear, LayerNormLinear, LayerNorm, RMSNorm, DotProductAttention, GroupedLinear, Fp8Padding, Fp8Unpadding)
    pytorch = package(
        "transformer_engine.pytorch",
        fp8=fp8,
        fp8_autocast=fp8_autocast,
        distributed=distributed,
        **{layer.__name__: layer for layer in layers},
    )
    package("transformer_engine", common=common, pytorch=pytorch, __version__=VERSION)
