"""The forward pass of a dense transformer layer that one rank holds whole, in about 25 calls of torch.

Megatron-Core 0.19.2 computes the same numbers through layers that communicate, recompute, offload, drop and fuse, each
of which looks for what it has to do every time: a fifth of the time of a step of the demo. `DenseLayer` computes with
the parts of such a layer that there are, where all that it leaves out has nothing to do; every other layer is
Megatron-Core's.

Shape suffixes: S sequence, B batch, H hidden size, G key heads, N query heads, D head dimension.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.weak import WeakIdKeyDictionary

from mimo_train.models.attention import SdpaAttention
from mimo_train.models.own_gradients import linear, linear_halves
from mimo_train.models.turned_heads import parts_of, turned, turned_parts

NOTHING_TO_DO: dict[str, Any] = {
    "hidden_dropout": 0.0,
    "sequence_parallel": False,
    "fp32_residual_connection": False,
    "fine_grained_activation_offloading": False,
    "cpu_offloading": False,
    "gradient_accumulation_fusion": False,
    "delay_wgrad_compute": False,
    "tp_comm_overlap": False,
    "bias_activation_fusion": False,
    "use_te_activation_func": False,
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "mlp_chunks_for_training": 1,
    "mlp_chunks_for_prefill": 1,
    "attention_output_gate": False,
    "no_rope_freq": None,
    "apply_rope_fusion": False,
    "rotary_interleaved": False,
    "multi_latent_attention": False,
    "fused_single_qkv_rope": False,
    "flash_decode": False,
    "fp8": None,
    "fp4": None,
    "cuda_graph_impl": "none",
    "test_mode": False,
    "batch_invariant_mode": False,
}
"""Options of a config whose work is left out, by the value with which there is none."""


class DenseLayer:
    """What computes a layer; the layer's own parts and parameters."""

    def __init__(self, layer: TransformerLayer):
        attention, mlp = layer.self_attention, layer.mlp
        self._norms = layer.input_layernorm, layer.pre_mlp_layernorm
        self._attention, self._core = attention, attention.core_attention
        self._linears = attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2
        self._watched = [attention, self._core, mlp, *self._linears]
        self._query_norm, self._key_norm = (
            None if isinstance(norm, IdentityOp) else norm for norm in (attention.q_layernorm, attention.k_layernorm)
        )
        # Nothing comes between queries and keys as they are projected, and as they are turned.
        self._turns_alone = self._query_norm is None and self._key_norm is None
        self._groups, self._width = attention.num_query_groups_per_partition, attention.hidden_size_per_attention_head
        self._heads = attention.num_attention_heads_per_partition
        self._activation, self._gated = layer.config.activation_func, layer.config.gated_linear_unit

    @classmethod
    def of(cls, layer: TransformerLayer) -> "DenseLayer | None":
        """What computes a layer; None for one that has other parts, or something else to do."""
        return cls(layer) if _is_dense(layer) and _does_nothing_else(layer.config) else None

    @property
    def is_free(self) -> bool:
        """Whether nothing waits for the call of a part, or has taken its place: Megatron-Core's layer is for that, and
        calls them."""
        return not _has_any_global_hook() and not any(
            part._forward_pre_hooks
            or part._forward_hooks
            or part._backward_hooks
            or part._backward_pre_hooks
            or "forward" in part.__dict__
            for part in self._watched
        )

    def __call__(
        self,
        hidden_SBH: torch.Tensor,
        attention_mask: torch.Tensor | None,
        rotary_pos_emb: torch.Tensor | None,
        packed_seq_params: Any,
    ) -> torch.Tensor:
        """The layer's output [S, B, H]. Arguments are those of Megatron-Core's layer."""
        turns = () if rotary_pos_emb is None else self._turns(rotary_pos_emb, hidden_SBH.dtype)
        return self._behind(hidden_SBH, self._context(hidden_SBH, turns, attention_mask, packed_seq_params))

    def compile(self, compiled: Callable[[Callable], Callable]) -> None:
        """Let what is in front of core attention and what is behind it be compiled, each to one piece: neither asks
        where documents end or what masks there are.

        Args:
            compiled: makes of such a function, of tensors, a compiled one.
        """
        self._turns_alone = False  # the compiler puts them together
        self._before, self._behind = compiled(self._before), compiled(self._behind)  # type: ignore[method-assign]

    def _context(
        self,
        hidden_SBH: torch.Tensor,
        turns: tuple[torch.Tensor, ...],
        attention_mask: torch.Tensor | None,
        packed_seq_params: Any,
    ) -> torch.Tensor:
        """What core attention gives."""
        if turns and self._turns_alone:
            mixed = self._mixed(hidden_SBH)
            context = self._core.attend_turned(mixed, *turns, packed_seq_params)
            if context is not None:
                return context
            query, key, value = turned_parts(mixed, *turns)
        else:
            query, key, value = self._before(hidden_SBH, *turns)
        return self._core(query, key, value, attention_mask, packed_seq_params=packed_seq_params)

    def _before(self, hidden_SBH: torch.Tensor, *turns: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values; `turns` are cosines and sines, where there are any."""
        mixed = self._mixed(hidden_SBH)
        query, key, value = parts_of(mixed)
        if self._query_norm is not None:
            query = self._query_norm(query)
        if self._key_norm is not None:
            key = self._key_norm(key)
        if turns:
            query, key = turned(query, *turns), turned(key, *turns)
        return query, key, value

    def _mixed(self, hidden_SBH: torch.Tensor) -> torch.Tensor:
        """By key head its queries, its key and its value, [S, B, G, E, D]."""
        qkv, norm = self._linears[0], self._norms[0]
        mixed = linear(norm(hidden_SBH), qkv.weight, qkv.bias)
        return mixed.unflatten(-1, (self._groups, self._heads // self._groups + 2, self._width))

    def _behind(self, hidden_SBH: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """The layer's output, from its input and what core attention gives."""
        _, proj, fc1, fc2 = self._linears
        hidden_SBH = hidden_SBH + linear(context, proj.weight, proj.bias)
        normed = self._norms[1](hidden_SBH)
        if self._gated:
            gate, inner = linear_halves(normed, fc1.weight, fc1.bias)
            inner = self._activation(gate) * inner
        else:
            inner = self._activation(linear(normed, fc1.weight, fc1.bias))
        return hidden_SBH + linear(inner, fc2.weight, fc2.bias)

    def _turns(self, angles: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of a layer's angles, those for the first half of a head negated; computed once for all
        layers that have the same."""
        attention = self._attention
        scale, kind = attention._yarn_concentration_factor, getattr(attention, "kind_of_angles", None)
        # What is computed in inference mode cannot be used where gradients are wanted.
        key = scale, kind, dtype, torch.is_inference_mode_enabled()
        known = _TURNS.setdefault(angles, {})
        if key not in known:
            own = angles if kind is None else attention.own_angles(angles)
            cos, sin = own.cos() * scale, own.sin() * scale
            first, second = sin.chunk(2, dim=-1)
            known[key] = cos.to(dtype), torch.cat((-first, second), dim=-1).to(dtype)
        return known[key]


_TURNS: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""By the angles of a model's positions: cosines and sines, as layers use them."""


def _is_dense(layer: TransformerLayer) -> bool:
    """Whether a layer has just the parts that are computed, each whole on this rank."""
    attention, mlp = layer.self_attention, layer.mlp
    return (
        type(mlp) is MLP
        and layer.pg_collection.tp.size() == 1
        and isinstance(attention.core_attention, SdpaAttention)
        # Adapters and Transformer Engine have classes of their own.
        and [type(attention.linear_qkv), type(mlp.linear_fc1)] == [ColumnParallelLinear] * 2
        and [type(attention.linear_proj), type(mlp.linear_fc2)] == [RowParallelLinear] * 2
        and isinstance(layer.cross_attention, IdentityOp)
        and layer.self_attn_bda is get_bias_dropout_add
        and layer.mlp_bda is get_bias_dropout_add
        and not layer.hidden_dropout
    )


def _does_nothing_else(config: TransformerConfig) -> bool:
    """Whether an option asks for nothing that is left out. Recomputation of whole layers is around them."""
    return config.recompute_granularity != "selective" and all(
        getattr(config, name, neutral) == neutral for name, neutral in NOTHING_TO_DO.items()
    )
