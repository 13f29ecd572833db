"""Layer specs: the classes of a transformer layer.

There are two kinds: `te` (Transformer Engine, if installed, on CUDA) and `torch` (plain norms and Megatron-Core's
linear layers around `SdpaAttention`). Initial weights depend only on (seed, module, layer), never on the layout: every
layer seeds the CPU generator, and every weight takes its seed from it (`initial_weights`). Experts are seeded one by
one.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from megatron.core.utils import get_pg_rank

from mimo_train.config.errors import UserError
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.models.attention import SdpaAttention, WindowAttention
from mimo_train.models.dense_layer import DenseLayer
from mimo_train.models.documents import attention_inside_documents
from mimo_train.models.experts import expert_layer
from mimo_train.models.fp8 import prepare_layer
from mimo_train.models.lora import add_adapters, linear_classes
from mimo_train.models.norms import NormedAdd, ScaledAdd, TorchNorm
from mimo_train.models.parameters import seed_for
from mimo_train.models.rotary import RotaryAttention


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
        prepare_layer(self)
        self._dense = DenseLayer.of(self) if getattr(config, "dense_layers", False) else None

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
        if self._dense and self._dense.is_free and all(value is None for value in options.values()):
            return self._dense(hidden_states, **inputs), None
        return super().forward(hidden_states, **inputs, **options)


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


def layer_spec(config: TransformerConfig, mask: AttnMaskType, te: bool, *, dense: bool = False) -> ModuleSpec:
    """Return the spec of one pre-norm transformer layer with the given attention mask. Layers with adapters or windows
    are of the torch kind, since adapters extend Megatron-Core's linear layers. `dense` is true if the layer has no
    experts although the config has some."""
    experts = config.num_moe_experts is not None and not dense
    windows = getattr(config, "full_attention", None) is not None
    kind = _te_submodules if te and not config.lora.rank and not windows else _torch_submodules
    submodules = kind(config, experts)
    attention = replace(submodules.self_attention, params={"attn_mask_type": mask})
    if getattr(config, "packed", False):
        attention = replace(attention, submodules=_inside_documents(attention.submodules, config))
    if windows:
        inside = replace(attention.submodules, core_attention=WindowAttention)
        attention = replace(attention, submodules=inside)
    changes: dict[str, Any] = {"self_attention": attention}
    if getattr(config, "layer_scale", 0):
        changes |= dict.fromkeys(("self_attn_bda", "mlp_bda"), ModuleSpec(ScaledAdd, params={"config": config}))
    return ModuleSpec(module=SeededTransformerLayer, submodules=replace(submodules, **changes))


def _inside_documents(parts: SelfAttentionSubmodules, config: TransformerConfig) -> SelfAttentionSubmodules:
    """Return the parts with a core attention that stays inside documents. With context parallelism it is ours, because
    Transformer Engine requires each document cut over the ranks, not the whole row."""
    if parts.core_attention is SdpaAttention:
        return parts
    cut = config.context_parallel_size > 1
    return replace(parts, core_attention=SdpaAttention if cut else attention_inside_documents(parts.core_attention))


def mlp_submodules(te: bool, adapted: bool = False) -> MLPSubmodules:
    """Return the linear layers of a feed-forward block without a norm (projectors). `adapted` ones are never
    Transformer Engine's."""
    if te and not adapted:
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

        return MLPSubmodules(linear_fc1=TEColumnParallelLinear, linear_fc2=TERowParallelLinear)
    column, row = linear_classes(adapted)
    return MLPSubmodules(linear_fc1=column, linear_fc2=row)


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


def norm_class(te: bool) -> type:
    """Return the builder of a separate norm (final norms)."""
    if te:
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm
    return TorchNorm


def _te_submodules(config: TransformerConfig, experts: bool) -> TransformerLayerSubmodules:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_submodules

    if not experts:
        return get_gpt_layer_with_transformer_engine_submodules(qk_layernorm=config.qk_layernorm)
    submodules = get_gpt_layer_with_transformer_engine_submodules(
        num_experts=config.num_moe_experts, moe_grouped_gemm=True, qk_layernorm=config.qk_layernorm
    )
    return replace(submodules, mlp=expert_layer(mlp_submodules(te=True), te=True))


def _torch_submodules(config: TransformerConfig, experts: bool) -> TransformerLayerSubmodules:
    head_norm = TorchNorm if config.qk_layernorm else IdentityOp
    # Checkpoints name norms as Transformer Engine does, so that either spec reads the other's. Before experts
    # Transformer Engine keeps the norm separate, too.
    column, row = linear_classes(adapted=config.lora.rank > 0)
    names = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if not experts:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
        linears = MLPSubmodules(linear_fc1=column, linear_fc2=row)
        mlp = partial(MLP.as_mlp_submodule, submodules=linears)
    else:
        mlp = expert_layer(mlp_submodules(te=False), te=False)
    return TransformerLayerSubmodules(
        input_layernorm=TorchNorm,
        self_attention=ModuleSpec(
            module=SelfAttention,
            submodules=SelfAttentionSubmodules(
                linear_qkv=column,
                core_attention=SdpaAttention,
                linear_proj=row,
                q_layernorm=head_norm,
                k_layernorm=head_norm,
            ),
        ),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=TorchNorm,
        mlp=mlp,
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=names,
    )


def language_layers(llm: LlmSpec, config: TransformerConfig, te: bool) -> list[ModuleSpec]:
    """Return the specs of all layers of the model, over all pipeline stages. With `te`, layers are Transformer Engine's
    where it supports what the model needs."""
    # Transformer Engine's attention caps no scores. It supports windows with context parallelism only by exchanges that
    # Megatron-Core does not use by default.
    te = te and not llm.attention_softcap and not (llm.window and config.context_parallel_size > 1)

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
    """One of the first layers, which adds an encoder's features to its output (DeepStack, arXiv 2406.04334)."""

    def forward(
        self, hidden_states: torch.Tensor, *arguments: Any, context: torch.Tensor | None = None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the layer, as in Megatron-Core. `context`: [layers that add, S, B, H], zero where there is no image."""
        output, _ = super().forward(hidden_states, *arguments, context=None, **options)
        return output if context is None else output + context[self.layer_number - 1], context


def _with_bias(linear: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    """Return a builder of the linear layer with a bias. Megatron-Core 0.19.2 gives attention's output projection a bias
    only if all linear layers have one (transformer/attention.py:418)."""

    def build(*arguments: Any, **options: Any) -> torch.nn.Module:
        return linear(*arguments, **options | {"bias": True})

    return build
