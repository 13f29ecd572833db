"""The forward pass of a dense transformer layer that one rank holds whole, in about 25 calls of torch.

Megatron-Core 0.19.2 computes the same numbers through layers that check in every call for communication, recomputation,
offloading, dropout and fusion: a fifth of the time of a step of the demo on a CPU. `DenseLayer` computes a layer from
its parts if there is no such work. Megatron-Core computes every other layer.

With `train.compile=layers` the code before and after core attention is compiled, and layers of equal sizes share one
graph. Attention stays outside: it has its own kernels, and reads on the host where documents end.

Shape suffixes: S sequence, B batch, H hidden size, G key heads, E queries of a key head with its key and its value, N
query heads, D head dimension.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.weak import WeakIdKeyDictionary

from mimo_train.config.errors import UserError
from mimo_train.config.schema import ConfigContainer
from mimo_train.cpu import attention as cpu_attention
from mimo_train.cpu import kernels
from mimo_train.layout.kernels import compiled_modules
from mimo_train.models.attention import SdpaAttention

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
"""Config options whose work `DenseLayer` omits, with the value that means no work."""


class DenseLayer:
    """Computes a transformer layer with the layer's own parts and parameters."""

    def __init__(self, layer: TransformerLayer):
        attention, mlp = layer.self_attention, layer.mlp
        self._norms = layer.input_layernorm, layer.pre_mlp_layernorm
        self._attention, self._core = attention, attention.core_attention
        self._linears = attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2
        self._parts = [attention, self._core, mlp, *self._linears]
        self._query_norm, self._key_norm = (
            None if isinstance(norm, IdentityOp) else norm for norm in (attention.q_layernorm, attention.k_layernorm)
        )
        self._groups, self._width = attention.num_query_groups_per_partition, attention.hidden_size_per_attention_head
        self._heads = attention.num_attention_heads_per_partition
        self._rotates = getattr(attention, "rotates", True)
        self._activation, self._gated = layer.config.activation_func, layer.config.gated_linear_unit
        # `cpu_attention` reads queries, keys and values as they are projected.
        is_plain = self._query_norm is None and self._key_norm is None
        self._has_cpu_kernels = getattr(layer.config, "cpu_kernels", False)
        self._linear = kernels.linear if self._has_cpu_kernels else F.linear
        self._has_cpu_attention = self._has_cpu_kernels and is_plain and self._core.is_plain

    @classmethod
    def of(cls, layer: TransformerLayer) -> "DenseLayer | None":
        """Return the `DenseLayer` of a layer; None if the layer has other parts or other work."""
        config = layer.config
        if config.recompute_granularity == "selective" or not _is_dense(layer):
            return None
        is_idle = all(getattr(config, name, neutral) == neutral for name, neutral in NOTHING_TO_DO.items())
        return cls(layer) if is_idle else None

    @property
    def is_free(self) -> bool:
        """True if no part has a hook or a replaced forward, which need Megatron-Core's layer to call the part."""
        for part in self._parts:
            hooks = part._forward_pre_hooks or part._forward_hooks or part._backward_hooks or part._backward_pre_hooks
            if hooks or "forward" in part.__dict__:
                return False
        return not _has_any_global_hook()

    def __call__(
        self,
        hidden_SBH: torch.Tensor,
        attention_mask: torch.Tensor | None,
        rotary_pos_emb: torch.Tensor | None,
        packed_seq_params: Any,
    ) -> torch.Tensor:
        """Return the layer's output [S, B, H]. The arguments are those of Megatron-Core's layer."""
        rotation: tuple[torch.Tensor, ...] = (
            self._rotation(rotary_pos_emb, hidden_SBH.dtype) if rotary_pos_emb is not None and self._rotates else ()
        )
        has_rotation = len(rotation) > 0 and rotation[0].size(-1) == self._width and packed_seq_params is None
        has_rotation = has_rotation and attention_mask is None
        if self._has_cpu_attention and has_rotation and cpu_attention.supports(hidden_SBH):
            context = cpu_attention.rotary_attention(
                self._mixed(hidden_SBH), rotation[0], rotation[1], self._core.softmax_scale
            )
        else:
            query, key, value = self._before_attention(hidden_SBH, *rotation)
            context = self._core(query, key, value, attention_mask, packed_seq_params=packed_seq_params)
        return self._after_attention(hidden_SBH, context)

    def compile(self, compiled: Callable[[Callable], Callable]) -> None:
        """Compile the code before and after core attention with `compiled`, each into one graph without documents and
        masks."""
        self._has_cpu_attention = False
        self._before_attention = compiled(self._before_attention)  # type: ignore[method-assign]
        self._after_attention = compiled(self._after_attention)  # type: ignore[method-assign]

    def _before_attention(self, hidden_SBH: torch.Tensor, *rotation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return queries [S, B, N, D], keys and values [S, B, G, D]; `rotation` holds cosines and sines, if any."""
        query, key, value = split_heads(self._mixed(hidden_SBH))
        if self._query_norm is not None:
            query = self._query_norm(query)
        if self._key_norm is not None:
            key = self._key_norm(key)
        if rotation:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        return query, key, value

    def _mixed(self, hidden_SBH: torch.Tensor) -> torch.Tensor:
        """Return [S, B, G, E, D]: for each key head its queries, its key and its value."""
        qkv, norm = self._linears[0], self._norms[0]
        mixed = self._linear(norm(hidden_SBH), qkv.weight, qkv.bias)
        return mixed.unflatten(-1, (self._groups, self._heads // self._groups + 2, self._width))

    def _after_attention(self, hidden_SBH: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        _, proj, fc1, fc2 = self._linears
        hidden_SBH = hidden_SBH + self._linear(context, proj.weight, proj.bias)
        inner = self._linear(self._norms[1](hidden_SBH), fc1.weight, fc1.bias)
        if self._has_cpu_kernels and self._gated and self._activation is F.silu:
            inner = kernels.swiglu(inner)
        elif self._gated:
            gate, inner = inner.chunk(2, dim=-1)
            inner = self._activation(gate) * inner
        else:
            inner = self._activation(inner)
        return hidden_SBH + self._linear(inner, fc2.weight, fc2.bias)

    def _rotation(self, angles: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of a layer's angles, with the sines of the first half of a head negated. Computed
        once for all layers with the same angles."""
        attention = self._attention
        scale, kind = attention._yarn_concentration_factor, getattr(attention, "kind_of_angles", None)
        # Tensors computed in inference mode cannot be used with gradients.
        key = scale, kind, dtype, torch.is_inference_mode_enabled()
        cached = _ROTATIONS.setdefault(angles, {})
        if key not in cached:
            layer_angles = angles if kind is None else attention.own_angles(angles)
            cos, sin = layer_angles.cos() * scale, layer_angles.sin() * scale
            first, second = sin.chunk(2, dim=-1)
            cached[key] = cos.to(dtype), torch.cat((-first, second), dim=-1).to(dtype)
        return cached[key]


def split_heads(mixed_SBGED: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries [S, B, N, D], keys and values [S, B, G, D]."""
    if mixed_SBGED.shape[3] == 3:
        query, key, value = mixed_SBGED.unbind(dim=3)
        return query, key, value
    query, key, value = mixed_SBGED.split([mixed_SBGED.shape[3] - 2, 1, 1], dim=3)
    return query.flatten(2, 3), key.squeeze(3), value.squeeze(3)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads [S, B, N, D] by their positions. Of wider heads only the first channels rotate.

    Args:
        cos: [S, 1 or B, 1, D or less].
        sin: the same shape, its first half negated.
    """
    width = cos.shape[-1]
    if width < heads.shape[-1]:
        return torch.cat((rotate(heads[..., :width], cos, sin), heads[..., width:]), dim=-1)
    # Swaps the halves of a head; the sine is negated once for all layers.
    return heads * cos + heads.roll(width // 2, dims=-1) * sin


_ROTATIONS: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Cached cosines and sines, by the angles of a model's positions."""


def _is_dense(layer: TransformerLayer) -> bool:
    """True if a layer has exactly the parts that `DenseLayer` computes, each whole on this rank."""
    attention, mlp = layer.self_attention, layer.mlp
    return (
        type(mlp) is MLP
        and isinstance(attention, SelfAttention)
        and layer.pg_collection.tp.size() == 1
        and isinstance(attention.core_attention, SdpaAttention)
        # Adapters and Transformer Engine have their own classes.
        and [type(attention.linear_qkv), type(mlp.linear_fc1)] == [ColumnParallelLinear] * 2
        and [type(attention.linear_proj), type(mlp.linear_fc2)] == [RowParallelLinear] * 2
        and isinstance(layer.cross_attention, IdentityOp)
        and layer.self_attn_bda is get_bias_dropout_add
        and layer.mlp_bda is get_bias_dropout_add
        and not layer.hidden_dropout
    )


BACKEND = "inductor"
"""Backend of torch.compile."""

MOST = 256
"""Graphs of one function of all modules after which torch ends the run; 8 by default."""


def compile_layers(chunks: Iterable[torch.nn.Module], cfg: ConfigContainer, name: str, kind: str) -> None:
    """Compile the layers of this rank's chunks of a module if the config says so. Happens at their first passes.

    Args:
        kind: cuda or cpu.

    Raises:
        UserError: these layers cannot be compiled.
    """
    if name not in compiled_modules(cfg):
        return
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = MOST
    layers: list[Any] = [part for chunk in chunks for part in chunk.modules() if hasattr(part, "_dense")]
    for layer in layers:
        if layer._dense is None:
            raise UserError(
                f"modules.{name}.compile: is layers, and its layers are not torch's in plain calls (they have "
                f"{type(layer.self_attention).__name__}): set it to none"
            )
        layer._dense.compile(_compiled_on_cpu if kind == "cpu" else _compiled)


def _compiled(function: Callable) -> Callable:
    # Texts and images have any length: sizes are symbolic from the start, so one graph serves all of them.
    return torch.compile(function, dynamic=True, fullgraph=True, backend=BACKEND)


def _compiled_on_cpu(function: Callable) -> Callable:
    """Compile a function in a process whose other compiled code runs eagerly, see `cpu.backend`."""
    compiled = _compiled(function)

    def call(*tensors: torch.Tensor) -> Any:
        with torch.compiler.set_stance("default"):
            return compiled(*tensors)

    return call
