"""The attention of a layer, from Megatron-Core's parts around `SdpaAttention`."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from mimo_train.config.llm_spec import LlmSpec
from mimo_train.models.attention import SdpaAttention, SinkAttention, WindowAttention
from mimo_train.models.blocks.module import BlockModule
from mimo_train.models.documents import attention_inside_documents
from mimo_train.models.lora.linear import linear_classes
from mimo_train.models.norms import NormOverHeads, TorchNorm
from mimo_train.models.rotary import angles_of_layer, attention_factor


def build(config: TransformerConfig, te: bool) -> BlockModule:
    """Return the classes of a language model's attention."""
    block = build_attention(config, AttnMaskType.causal, te)
    assert isinstance(block.module, ModuleSpec)
    attention, llm = replace(block.module, module=RotaryAttention), config.llm
    if llm.proj_bias:
        parts = attention.submodules
        attention = replace(attention, submodules=replace(parts, linear_proj=_with_bias(parts.linear_proj)))
    if llm.qk_norm_over_heads:
        norms = (partial(NormOverHeads, heads=heads) for heads in (llm.num_attention_heads, llm.key_heads))
        q_norm, k_norm = norms
        attention = replace(attention, submodules=replace(attention.submodules, q_layernorm=q_norm, k_layernorm=k_norm))
    if llm.attention_sinks:
        attention = replace(attention, submodules=replace(attention.submodules, core_attention=SinkAttention))
    return replace(block, module=attention)


def build_attention(config: TransformerConfig, mask: AttnMaskType, te: bool) -> BlockModule:
    """Return the classes of attention with a mask; of an encoder those of its windows too (`config.full_attention`)."""
    if te:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_submodules

        layer = get_gpt_layer_with_transformer_engine_submodules(qk_layernorm=config.qk_layernorm)
        norm, parts, names = layer.input_layernorm, layer.self_attention.submodules, {}
    else:
        head_norm = TorchNorm if config.qk_layernorm else IdentityOp
        column, row = linear_classes(adapted=config.lora.rank > 0)
        norm, names = TorchNorm, {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
        parts = SelfAttentionSubmodules(
            linear_qkv=column,
            core_attention=SdpaAttention,
            linear_proj=row,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        )
    if getattr(config, "packed", False):
        parts = _inside_documents(parts, config)
    if getattr(config, "full_attention", None) is not None:
        parts = replace(parts, core_attention=WindowAttention)
    return BlockModule(norm, ModuleSpec(SelfAttention, {"attn_mask_type": mask}, parts), names)


class RotaryAttention(SelfAttention):
    """`SelfAttention` with its layer's own rotary frequencies, if any, and attention factor; `config.llm` is the
    `LlmSpec`. Megatron-Core 0.19.2 gives all layers the same frequencies, and reads no attention factor from a
    config."""

    def __init__(self, config: TransformerConfig, *arguments: Any, layer_number: int, **options: Any):
        llm: LlmSpec = config.llm
        if llm.qk_norm_over_heads:
            config = copy.copy(config)
            config.qk_layernorm = True  # Megatron-Core builds no norms without
        super().__init__(config, *arguments, layer_number=layer_number, **options)
        if llm.qk_norm_over_heads:
            self.q_layernorm.tp_group = self.k_layernorm.tp_group = self.pg_collection.tp
        self.kind_of_angles = bool(llm.window_of(layer_number - 1)) if llm.local_rope_base else None
        """True for a local layer; None if all layers have the same angles."""
        self.rotates = layer_number - 1 not in llm.no_rope_layers
        self._yarn_concentration_factor = 1.0 if self.kind_of_angles else attention_factor(llm.rope_scaling)

    def forward(
        self, hidden_states: torch.Tensor, *arguments: Any, rotary_pos_emb: torch.Tensor | None = None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend as in Megatron-Core. `rotary_pos_emb`: [S, 1, 1, angles], of all kinds of layers."""
        if rotary_pos_emb is not None:
            rotary_pos_emb = self.own_angles(rotary_pos_emb) if self.rotates else None
        return super().forward(hidden_states, *arguments, rotary_pos_emb=rotary_pos_emb, **options)

    def own_angles(self, angles: torch.Tensor) -> torch.Tensor:
        """Return the angles of this layer, from those of all kinds of layers, [S, 1, 1, angles]."""
        return angles if self.kind_of_angles is None else angles_of_layer(angles, self.kind_of_angles)


def _inside_documents(parts: SelfAttentionSubmodules, config: TransformerConfig) -> SelfAttentionSubmodules:
    """Return the parts with a core attention that stays inside documents. With context parallelism it is ours, because
    Transformer Engine requires each document cut over the ranks, not the whole row."""
    if parts.core_attention is SdpaAttention:
        return parts
    cut = config.context_parallel_size > 1
    return replace(parts, core_attention=SdpaAttention if cut else attention_inside_documents(parts.core_attention))


def _with_bias(linear: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    """Return a builder of the linear layer with a bias. Megatron-Core 0.19.2 gives attention's output projection a bias
    only if all linear layers have one (transformer/attention.py:418)."""

    def build(*arguments: Any, **options: Any) -> torch.nn.Module:
        return linear(*arguments, **options | {"bias": True})

    return build
