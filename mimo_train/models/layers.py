"""Layer specs: the classes of a transformer layer.

There are two kinds: `te` (Transformer Engine, if installed, on CUDA) and `torch` (plain norms and Megatron-Core's
linear layers around `SdpaAttention`). Initial weights depend only on (seed, module, layer), never on the layout: every
layer seeds the CPU generator, and every weight takes its seed from it (`initial_weights`). Experts are seeded one by
one.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from megatron.core.utils import get_pg_rank
from torch.autograd.graph import saved_tensors_hooks

from mimo_train.config.errors import UserError
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.schema_train import recompute_parts
from mimo_train.models.blocks.attention import module as attention
from mimo_train.models.blocks.delta import module as delta
from mimo_train.models.blocks.experts import module as experts
from mimo_train.models.blocks.latent import module as latent
from mimo_train.models.blocks.mlp import module as mlp
from mimo_train.models.blocks.mlp.module import mlp_submodules
from mimo_train.models.blocks.module import BlockModule
from mimo_train.models.dense_layer import DenseLayer
from mimo_train.models.fp8 import prepare_layer
from mimo_train.models.lora.adapters import add_adapters, quantize_linears
from mimo_train.models.lora.linear import linear_classes
from mimo_train.models.norms import NormedAdd, ScaledAdd, norm_class
from mimo_train.models.parameters import seed_for
from mimo_train.models.recompute import NormOutputs, recompute_blocks


class SeededTransformerLayer(TransformerLayer):
    """A transformer layer whose initial weights depend on its number in the model, not on its stage. `config.init_seed`
    is the seed of its module, and `config.adapters` has its adapters."""

    def __init__(
        self, config: TransformerConfig, submodules: TransformerLayerSubmodules, layer_number: int = 1, **kwargs: Any
    ):
        offset = get_transformer_layer_offset(config, kwargs.get("vp_stage"), get_pg_rank(kwargs["pg_collection"].pp))
        seed = seed_for(config.init_seed, "layer", layer_number + offset)
        torch.manual_seed(seed)
        super().__init__(config, submodules, layer_number=layer_number, **kwargs)
        add_adapters(self, f"{config.layers_name}.{self.layer_number - 1}", config, seed)
        quantize_linears(self, f"{config.layers_name}.{self.layer_number - 1}", config)
        prepare_layer(self)
        recompute_blocks(self, config.recompute)
        self._norm_outputs = NormOutputs.of(self, config.recompute)
        self._offload, self._is_first = config.offload, layer_number == 1
        self._is_parallel = getattr(config, "parallel_block", False)
        if self._is_parallel:
            self._normed: torch.Tensor | None = None
            self.input_layernorm.register_forward_hook(self._keep_normed)
        plain = getattr(config, "dense_layers", False) and not self._is_parallel
        self._dense = DenseLayer.of(self) if plain else None

    def _keep_normed(self, _norm: torch.nn.Module, _inputs: tuple, output: torch.Tensor) -> None:
        self._normed = output

    def _forward_pre_mlp_layernorm(self, hidden_states: torch.Tensor) -> Any:
        """Return the input of the feed-forward block, as in Megatron-Core, which adds its output to the second of a
        pair: here the input of attention, and the residual stream with attention."""
        if not self._is_parallel:
            return super()._forward_pre_mlp_layernorm(hidden_states)
        normed, self._normed = self._normed, None
        return normed, hidden_states

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the layer, as in Megatron-Core: (output [S, B, H], context)."""
        inputs = {
            "attention_mask": attention_mask,
            "rotary_pos_emb": rotary_pos_emb,
            "packed_seq_params": packed_seq_params,
        }
        with self._saving():
            return self._run(hidden_states, inputs, options)

    def _saving(self) -> AbstractContextManager:
        """Return the context in which autograd saves the tensors of a forward pass."""
        if (self._offload is None and self._norm_outputs is None) or not torch.is_grad_enabled():
            return nullcontext()
        hooks = (_same, _same) if self._offload is None else self._offload.hooks(self._is_first)
        return saved_tensors_hooks(*hooks) if self._norm_outputs is None else self._norm_outputs.recomputed(*hooks)

    def _run(self, hidden_states: torch.Tensor, inputs: dict[str, Any], options: dict[str, Any]) -> tuple:
        if self._dense:
            options.pop("padding_mask", None)  # of routers
        if self._dense and self._dense.is_free and all(value is None for value in options.values()):
            return self._dense(hidden_states, **inputs), None
        return super().forward(hidden_states, **inputs, **options)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def use_transformer_engine(kind: str) -> bool:
    """Return True if layers are built from Transformer Engine: on CUDA, if it is installed. Raise UserError if it
    cannot be imported, since Megatron-Core would treat it as missing."""
    if kind != "cuda" or find_spec("transformer_engine") is None:
        return False
    try:
        import_module("transformer_engine.pytorch")
    except Exception as error:  # a missing library or another version may raise anything
        raise UserError(
            "Transformer Engine is installed and cannot be imported "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}): "
            "repair it, or uninstall it, and layers are torch's"
        ) from error
    return True


def attends_unfused() -> bool:
    """Return True if the last attention of Transformer Engine (2.20.2) had no fused kernel: slow, with all scores in
    memory."""
    module = sys.modules.get("transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention")
    return module is not None and bool(module._attention_backends["use_unfused_attention"])


_MODULES: dict[str, Callable[[TransformerConfig, bool], BlockModule]] = {
    "attention": attention.build,
    "latent": latent.build,
    "delta": delta.build,
    "mlp": mlp.build,
    "experts": experts.build,
}
"""Builders of blocks in a language model, by `Block.kind`."""


def layer_spec(config: TransformerConfig, mask: AttnMaskType, te: bool) -> ModuleSpec:
    """Return the spec of one layer of an encoder or a resampler, with the given attention mask. Layers with adapters or
    windows are of the torch kind, since adapters extend Megatron-Core's linear layers. So are those that recompute
    their norms, which Transformer Engine fuses into linear layers."""
    te = te and not (config.lora.rank or "norms" in recompute_parts(config.recompute))
    te = te and getattr(config, "full_attention", None) is None
    layer = _joined(attention.build_attention(config, mask, te), mlp.build(config, te))
    if getattr(config, "layer_scale", 0):
        add = ModuleSpec(ScaledAdd, params={"config": config})
        layer = replace(layer, self_attn_bda=add, mlp_bda=add)
    return ModuleSpec(module=SeededTransformerLayer, submodules=layer)


def _joined(mixer: BlockModule, feed_forward: BlockModule) -> TransformerLayerSubmodules:
    return TransformerLayerSubmodules(
        input_layernorm=mixer.norm,
        self_attention=mixer.module,
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=feed_forward.norm,
        mlp=feed_forward.module,
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={**mixer.names, **feed_forward.names},
    )


def projector_submodules(kind: str, te: bool, adapted: bool = False) -> MLPSubmodules:
    """Return the linear layers of a projector: both of an mlp, only the first of a linear one."""
    if kind == "mlp":
        return mlp_submodules(te, adapted)
    return MLPSubmodules(linear_fc1=partial(_gathered_linear, linear_classes(adapted)[0]), linear_fc2=None)


def _gathered_linear(column: type, *args: Any, **options: Any) -> ColumnParallelLinear:
    """Build the layer of a linear projector, whose output is whole on every rank.

    `MultimodalProjector` requests the bias separately and adds this rank's part of it to the whole output, which fails
    for tp above 1 (Megatron-Core 0.19.2, multimodal_projector.py:56-82). Transformer Engine's layer gathers nothing
    (extensions/transformer_engine.py:1155).
    """
    return column(*args, **options | {"skip_bias_add": False})


def language_layers(llm: LlmSpec, config: TransformerConfig, te: bool) -> list[ModuleSpec]:
    """Return the specs of all layers of the model, over all pipeline stages. With `te`, layers are Transformer Engine's
    where it supports what the model needs."""
    layers = llm.layers()
    needs_torch = any(block.needs_torch(config.context_parallel_size) for layer in layers for block in layer.blocks)
    needs_torch = needs_torch or "norms" in recompute_parts(config.recompute)
    te = te and not (config.lora.rank or needs_torch or llm.torch_norms or config.bidirectional)

    @cache
    def spec(mixer: str, feed_forward: str, takes_features: bool) -> ModuleSpec:
        layer = _joined(_MODULES[mixer](config, te), _MODULES[feed_forward](config, te))
        if not llm.pre_norms:
            layer = replace(layer, input_layernorm=IdentityOp)
        if not llm.pre_norms or llm.parallel_block:
            layer = replace(layer, pre_mlp_layernorm=IdentityOp)
        if llm.post_norms or llm.residual_multiplier != 1:
            norm = norm_class(te) if llm.post_norms else IdentityOp
            params = {"config": config, "norm": norm, "multiplier": llm.residual_multiplier}
            add = ModuleSpec(NormedAdd, params=params)
            layer = replace(layer, self_attn_bda=add, mlp_bda=add)
        return ModuleSpec(DeepStackLayer if takes_features else SeededTransformerLayer, submodules=layer)

    kinds = [(layer.mixer.kind, layer.feed_forward.kind) for layer in layers]
    return [spec(*blocks, number < config.deepstack) for number, blocks in enumerate(kinds)]


class DeepStackLayer(SeededTransformerLayer):
    """One of the first layers, which adds an encoder's features to its output (DeepStack, arXiv 2406.04334)."""

    def forward(
        self, hidden_states: torch.Tensor, *arguments: Any, context: torch.Tensor | None = None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the layer, as in Megatron-Core. `context`: [layers that add, S, B, H], zero where there is no image."""
        output, _ = super().forward(hidden_states, *arguments, context=None, **options)
        return output if context is None else output + context[self.layer_number - 1], context
