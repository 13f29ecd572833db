"""A fake Transformer Engine, for tests without a GPU, also over tensors without memory.

`install` replaces the package before Megatron-Core is imported. It has what Megatron-Core 0.19.2 extends
(extensions/transformer_engine.py): constructors that take only keywords of version 2.20.2, which the extra `gpu`
installs, and forward passes with the right shapes and messages. In fp8, sizes that the real matmuls do not support are
rejected, and matmuls use the last copy of a weight. Values in fp8 are not rounded. Attention over context-parallel
ranks sends nothing, and takes a packed row as one text.

Shape suffixes: S sequence, B batch, N heads, D head dimension; T positions of a packed row.
"""

import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import Parameter
from torch.nn.init import ones_, zeros_
from torch.utils import checkpoint as recompute

VERSION = "2.20.2"
"""Megatron-Core selects code paths by it."""
LINEAR = """sequence_parallel fuse_wgrad_accumulation tp_group tp_size get_rng_state_tracker init_method bias
    return_bias params_dtype parallel_mode parameters_split device ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad
    ub_bulk_dgrad ub_bulk_wgrad ub_name delay_wgrad_compute symmetric_ar_type name"""
NORM = "eps sequence_parallel params_dtype zero_centered_gamma hidden_size device dtype"
KEYWORDS = {
    "Linear": f"{LINEAR} rng_tracker_name save_original_input",
    "LayerNormLinear": f"{LINEAR} eps normalization return_layernorm_output return_layernorm_output_gathered "
    "zero_centered_gamma",
    "GroupedLinear": """sequence_parallel fuse_wgrad_accumulation tp_group tp_size get_rng_state_tracker
    rng_tracker_name init_method bias return_bias params_dtype parallel_mode device ub_overlap_rs ub_overlap_ag ub_name
    delay_wgrad_compute save_original_input single_grouped_weight single_grouped_bias name use_grouped_tensor""",
    "DotProductAttention": """num_gqa_groups attention_dropout qkv_format attn_mask_type window_size
    bottom_right_diagonal softcap sequence_parallel tp_size get_rng_state_tracker tp_group layer_number attention_type
    cp_group cp_global_ranks cp_stream cp_comm_type softmax_scale softmax_type return_max_logit name""",
    "LayerNorm": NORM,
    "RMSNorm": NORM,
}
"""Keywords of the real constructors, as released (transformer_engine/pytorch/module/, attention/)."""
PASS = """qkv_format cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv
    window_size bottom_right_diagonal softcap checkpoint_core_attention core_attention_bias_type core_attention_bias
    alibi_slopes fast_zero_fill inference_params pad_between_seqs fp8_output num_splits"""
"""Keywords of a forward pass of the real attention besides its inputs."""
DEFAULTS = {
    **dict.fromkeys(" ".join(KEYWORDS.values()).split()), "eps": 1e-5, "tp_size": 1, "bias": True, "device": "cuda",
    "normalization": "LayerNorm", "attention_dropout": 0.0, "sequence_parallel": False,
}  # fmt: skip


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
    """A layer that takes the keywords of the real one, and no others."""

    fp8 = fp8_calibration = False

    def __init__(self, options: dict[str, Any]):
        super().__init__()
        name = next(base.__name__ for base in type(self).__mro__ if base.__name__ in KEYWORDS)  # not of a subclass
        if unknown := sorted(options.keys() - KEYWORDS[name].split()):
            raise TypeError(f"te.pytorch.{name} {VERSION} has no keyword {', '.join(unknown)}")
        self.options = SimpleNamespace(**DEFAULTS | options)
        self.tp_group = self.options.tp_group
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
        assert not set(packed) - set(PASS.split()), packed
        assert query.dtype == key.dtype == value.dtype, (query.dtype, key.dtype, value.dtype)
        is_row = query.dim() == 3
        if is_row:
            ends = packed["cu_seqlens_q"], packed["cu_seqlens_kv"]
            assert packed["qkv_format"] == "thd" and "padding" in attn_mask_type, (packed["qkv_format"], attn_mask_type)
            assert all(end.dtype == torch.int32 and end.device == query.device for end in ends), ends
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


Format = SimpleNamespace(E4M3="e4m3", HYBRID="hybrid")


class _Recipe:
    unit = 16

    def __init__(self, *, fp8_format: str, fp8_dpa: bool = False):
        assert not fp8_dpa, "attention in fp8"
        self.fp8_format = fp8_format


class Float8CurrentScaling(_Recipe):
    """`tensorwise`."""


class Float8BlockScaling(_Recipe):
    """`blockwise`."""

    def __init__(self, *, fp8_format: str):
        assert fp8_format == Format.E4M3
        super().__init__(fp8_format=fp8_format)


class MXFP8BlockScaling(_Recipe):
    """`mxfp8`."""

    unit = 32


_ACTIVE: list[_Recipe] = []


@contextmanager
def fp8_autocast(enabled: bool = True, fp8_recipe: _Recipe | None = None, fp8_group: Any = None) -> Iterator[None]:
    """Compute the matmuls of layers in fp8 inside the block."""
    assert enabled and fp8_recipe is not None, "Megatron-Core enters it for layers with fp8 alone"
    _ACTIVE.append(fp8_recipe)
    try:
        yield
    finally:
        _ACTIVE.pop()


def supported() -> tuple[bool, str]:
    """Return True: the device supports every recipe."""
    return True, ""


class Fp8Padding(torch.nn.Module):
    """`te.pytorch.Fp8Padding`: rows of zeros after those of each expert, up to a size that matmuls support."""

    def __init__(self, num_gemms: int, align_size: int | None = None):
        super().__init__()
        assert align_size is None, "Megatron-Core gives none to experts, nor do we"
        self.num_gemms = num_gemms

    def forward(self, inputs: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, list[int]]:
        """Return (padded rows, number per expert) from `inputs` [rows, width], with `m_splits` rows per expert. As the
        real one, it also pads in layers that stay in bf16."""
        assert len(m_splits) == self.num_gemms
        padded = _padded(m_splits)
        parts = zip(inputs.split(m_splits), m_splits, padded, strict=True)
        return torch.cat([F.pad(part, (0, 0, 0, after - before)) for part, before, after in parts]), padded


class Fp8Unpadding(Fp8Padding):
    """`te.pytorch.Fp8Unpadding`."""

    def forward(self, inputs: torch.Tensor, m_splits: list[int]) -> torch.Tensor:  # type: ignore[override]
        """Return `inputs` without the rows that `Fp8Padding` added; `m_splits` are those before padding."""
        parts = zip(inputs.split(_padded(m_splits)), m_splits, strict=True)
        return torch.cat([part[:rows] for part, rows in parts])


def _padded(m_splits: list[int]) -> list[int]:
    unit = _ACTIVE[-1].unit if _ACTIVE else _Recipe.unit
    return [-(-rows // unit) * unit for rows in m_splits]


class _CopyForWeight(torch.autograd.Function):
    """Returns the copy of a weight, and passes its gradient to the weight."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Fp8Weight:
    """The fp8 copy of a layer's weight: two bytes a number, for rows and columns together. As in the real package, it
    is made when the caller says that weights may have changed; `made` counts the copies."""

    def __init__(self) -> None:
        self.copy: torch.Tensor | None = None
        self.made = 0

    def of(self, weight: torch.Tensor, inputs: torch.Tensor, is_first_microbatch: bool | None) -> torch.Tensor:
        """Return the weight for the matmul of `inputs` [..., width]."""
        if not _ACTIVE:
            return weight
        rows, unit = inputs.shape[:-1].numel(), _ACTIVE[-1].unit
        # As `assert_dim_for_fp8_exec` of Transformer Engine, and multiples of 16 for the gradient of the weight,
        # which sums over rows (cublaslt_gemm.cu: "Leading dimension requirement").
        wrong = any(size % unit for size in (rows, *weight.shape))
        assert not wrong, f"fp8: {rows} rows, weight {tuple(weight.shape)}"
        if self.copy is None or is_first_microbatch is not False:
            self.copy, self.made = weight.detach().clone(), self.made + 1
        return _CopyForWeight.apply(weight, self.copy)


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
