"""The layers of a language model, each by what its family does there."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from mimo_train.config.llm_spec import LlmSpec
from mimo_train.models.language.attention import RotaryAttention
from mimo_train.models.language.norms import NormedAdd
from mimo_train.models.layers import SeededTransformerLayer, layer_spec, norm_class


def language_layers(llm: LlmSpec, config: TransformerConfig, te: bool) -> list[ModuleSpec]:
    """The specs of all layers of the model, over all pipeline stages.

    Args:
        te: whether layers are Transformer Engine's, as far as it does what they need.
    """
    te = te and _transformer_engine_can(llm, config)

    @cache
    def spec(experts: bool, takes_features: bool) -> ModuleSpec:
        layer = layer_spec(config, AttnMaskType.causal, te, dense=not experts)
        attention = replace(layer.submodules.self_attention, module=RotaryAttention)
        if llm.proj_bias:
            parts = attention.submodules
            attention = replace(attention, submodules=replace(parts, linear_proj=_with_bias(parts.linear_proj)))
        parts = replace(layer.submodules, self_attention=attention)
        if llm.post_norms:
            add = ModuleSpec(NormedAdd, params={"config": config, "norm": norm_class(te)})
            parts = replace(parts, self_attn_bda=add, mlp_bda=add)
        return replace(layer, submodules=parts, **({"module": DeepStackLayer} if takes_features else {}))

    return [spec(llm.has_experts(number), number < config.deepstack) for number in range(llm.num_layers)]


class DeepStackLayer(SeededTransformerLayer):
    """One of the first layers, that adds an encoder's features behind it (DeepStack, arXiv 2406.04334)."""

    def forward(
        self, hidden_states: torch.Tensor, *arguments: Any, context: torch.Tensor | None = None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As Megatron-Core's. `context`: [layers that add, S, B, H], zero where there is no picture."""
        output, _ = super().forward(hidden_states, *arguments, context=None, **options)
        return output if context is None else output + context[self.layer_number - 1], context


def _transformer_engine_can(llm: LlmSpec, config: TransformerConfig) -> bool:
    """Whether Transformer Engine's attention does what the model needs: it caps no scores, and a window with context
    parallelism only by exchanges that Megatron-Core does not ask it for by default."""
    return not llm.attention_softcap and not (llm.window and config.context_parallel_size > 1)


def _with_bias(linear: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    """A builder of the linear layer with a bias, which Megatron-Core 0.19.2 gives the output projection of attention
    only where all linear layers have one (transformer/attention.py:418)."""

    def build(*arguments: Any, **options: Any) -> torch.nn.Module:
        return linear(*arguments, **options | {"bias": True})

    return build
