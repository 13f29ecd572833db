"""The layers of `fake_engine`. Imports no Megatron-Core before a layer runs.

Shape suffixes: S sequence, B batch, N heads, D head dimension; T positions of a packed row.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import Parameter
from torch.nn.init import ones_, zeros_
from torch.utils import checkpoint as recompute

from mimo_train.preflight.dry_run.fake_fp8 import Fp8Weight

OVERLAP = ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_wgrad", "ub_bulk_dgrad", "ub_name")
"""Keywords of linear layers that overlap messages with products."""
GROUPED_OVERLAP = ("ub_overlap_ag", "ub_overlap_rs", "ub_name")
"""Those of grouped ones."""
PACKED = ("qkv_format", *(f"{what}_{of}" for what in ("cu_seqlens", "max_seqlen") for of in ("q", "kv")),
          "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "pad_between_seqs", "num_splits",
          "core_attention_bias_type", "core_attention_bias")  # fmt: skip
"""Keywords of a pass of attention beside its inputs."""


class NotHere:
    """A part of Transformer Engine that a dry run does not have."""

    def __init__(self, *_: Any, **__: Any):
        raise NotImplementedError("a dry run has no delayed scaling and no generators of Transformer Engine")


def checkpoint(
    function: Callable,
    *arguments: Any,
    distribute_saved_activations: bool,
    get_rng_state_tracker: Any,
    tp_group: Any,
) -> Any:
    """`te.pytorch.distributed.checkpoint`, without states of generators."""
    assert not distribute_saved_activations, "nobody asks for it"
    return recompute.checkpoint(function, *arguments, use_reentrant=True, preserve_rng_state=False)


class _Base(torch.nn.Module):
    """What layers have in common."""

    fp8 = fp8_calibration = False

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Its group."""
        self.tp_group = tp_group

    def get_extra_state(self) -> torch.Tensor:
        """Empty, as of all recipes but delayed scaling."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """There is none."""


def _parameter(shape: tuple[int, ...], dtype: torch.dtype | None, device: Any, init: Any = None) -> Parameter:
    weight = Parameter(torch.empty(shape, dtype=dtype, device=device))
    if init is not None:
        init(weight)
    return weight


class _Norm(_Base):
    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        *,
        sequence_parallel: bool = False,
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype | None = None,
        device: Any = "cuda",
        has_bias: bool,
    ):
        super().__init__()
        self.eps, self.hidden_size = eps, normalized_shape
        self.weight = _parameter((normalized_shape,), params_dtype, device, ones_)
        self.bias = _parameter((normalized_shape,), params_dtype, device, zeros_) if has_bias else None
        for parameter in self.parameters():
            parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., hidden size], normalised."""
        if self.bias is None:
            return F.rms_norm(inputs, (self.hidden_size,), self.weight, self.eps)
        return F.layer_norm(inputs, (self.hidden_size,), self.weight, self.bias, self.eps)


class LayerNorm(_Norm):
    """`te.pytorch.LayerNorm`."""

    def __init__(self, normalized_shape: int, eps: float = 1e-5, **options: Any):
        super().__init__(normalized_shape, eps, has_bias=True, **options)


class RMSNorm(_Norm):
    """`te.pytorch.RMSNorm`."""

    def __init__(self, normalized_shape: int, eps: float = 1e-5, **options: Any):
        super().__init__(normalized_shape, eps, has_bias=False, **options)


class Linear(_Base):
    """`te.pytorch.Linear`: a product, with the messages of its parallel mode around it."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        rng_tracker_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        **overlap: Any,
    ):
        super().__init__()
        assert not set(overlap) - set(OVERLAP), overlap
        self.parallel_mode, self.tp_size, self.sequence_parallel = parallel_mode, tp_size, sequence_parallel
        self.tp_group, self.use_bias, self.return_bias = tp_group, bias, return_bias
        rows = out_features // tp_size if parallel_mode == "column" else out_features
        columns = in_features // tp_size if parallel_mode == "row" else in_features
        self.in_features, self.out_features = columns, rows
        self.weight = _parameter((rows, columns), params_dtype, device, init_method)
        self.bias = _parameter((rows,), params_dtype, device, zeros_) if bias else None
        self.fp8_weight, self.save_original_input = Fp8Weight(), False
        if parallel_mode == "row" and self.bias is not None:
            self.bias.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inputs: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """[S, B, out features], with the bias apart where that is asked for."""
        from megatron.core.tensor_parallel import mappings

        group, own = self.tp_group, None if self.return_bias else self.bias
        weight = self.fp8_weight.of(self.weight, inputs, is_first_microbatch)
        if self.tp_size == 1 or self.parallel_mode is None:
            output = F.linear(inputs, weight, own)
        elif self.parallel_mode == "column":
            if self.sequence_parallel:
                inputs = mappings.gather_from_sequence_parallel_region(inputs, group=group)
            else:
                inputs = mappings.copy_to_tensor_model_parallel_region(inputs, group=group)
            output = F.linear(inputs, weight, own)
        else:
            output = F.linear(inputs, weight)
            if self.sequence_parallel:
                output = mappings.reduce_scatter_to_sequence_parallel_region(output, group=group)
            else:
                output = mappings.reduce_from_tensor_model_parallel_region(output, group=group)
            output = output if own is None else output + own
        return (output, self.bias) if self.return_bias else output


class LayerNormLinear(Linear):
    """`te.pytorch.LayerNormLinear`: a norm before the product."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        **options: Any,
    ):
        assert "rng_tracker_name" not in options, "of a Linear alone"
        super().__init__(in_features, out_features, **options)
        assert not return_layernorm_output, "nobody asks for it"
        self.eps, self.width = eps, in_features
        sizes = (in_features,), options.get("params_dtype"), options.get("device", "cuda")
        self.layer_norm_weight = _parameter(*sizes, ones_)
        self.layer_norm_bias = _parameter(*sizes, zeros_) if normalization == "LayerNorm" else None
        for parameter in filter(None.__ne__, (self.layer_norm_weight, self.layer_norm_bias)):
            parameter.sequence_parallel = self.sequence_parallel  # type: ignore[union-attr]

    def forward(self, inputs: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """As of `Linear`."""
        if self.layer_norm_bias is None:
            normed = F.rms_norm(inputs, (self.width,), self.layer_norm_weight, self.eps)
        else:
            normed = F.layer_norm(inputs, (self.width,), self.layer_norm_weight, self.layer_norm_bias, self.eps)
        return super().forward(normed, is_first_microbatch)


class GroupedLinear(_Base):
    """`te.pytorch.GroupedLinear`: products of several experts, each with rows of its own."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        init_method: Any = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        rng_tracker_name: str | None = None,
        delay_wgrad_compute: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        **overlap: Any,
    ):
        super().__init__()
        assert not set(overlap) - set(GROUPED_OVERLAP), overlap
        assert not single_grouped_weight and not single_grouped_bias, "nobody asks for it"
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
        self.parallel_mode, self.tp_size, self.tp_group = parallel_mode, tp_size, tp_group
        rows = out_features // tp_size if parallel_mode == "column" else out_features
        columns = in_features // tp_size if parallel_mode == "row" else in_features
        for expert in range(num_gemms):
            setattr(self, f"weight{expert}", _parameter((rows, columns), params_dtype, device, init_method))
            setattr(self, f"bias{expert}", _parameter((rows,), params_dtype, device, zeros_) if bias else None)
        self.fp8_weights = [Fp8Weight() for _ in range(num_gemms)]

    def forward(self, inputs: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Any:
        """[rows, out features] of [rows, in features], `m_splits` of each expert."""
        experts, parts = range(self.num_gemms), inputs.split(m_splits)
        biases = [getattr(self, f"bias{expert}") for expert in experts]
        outputs = []
        for expert, part in zip(experts, parts, strict=True):
            weight = self.fp8_weights[expert].of(getattr(self, f"weight{expert}"), part, is_first_microbatch)
            outputs.append(F.linear(part, weight, None if self.return_bias else biases[expert]))
        output = torch.cat(outputs)
        return (output, biases) if self.return_bias else output


class DotProductAttention(_Base):
    """`te.pytorch.DotProductAttention`: by one fused kernel."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
    ):
        super().__init__()
        self.scale, self.dropout, self.tp_group = softmax_scale, attention_dropout, tp_group

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
        """Of [S, B, N, D], or [T, N, D] in a packed row: [S, B, N * D] or [T, N * D]."""
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
            dropout_p=self.dropout if self.training else 0.0,
            is_causal="causal" in attn_mask_type,
            scale=self.scale,
            enable_gqa=query_BNSD.size(1) != key_BNSD.size(1),
        )
        context = context.permute(2, 0, 1, 3).flatten(2)
        return context.squeeze(1) if is_row else context
