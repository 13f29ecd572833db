"""The feed-forward block of a layer, from Megatron-Core's parts."""

from functools import partial

from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from mimo_train.models.blocks.module import BlockModule
from mimo_train.models.lora.linear import linear_classes
from mimo_train.models.norms import TorchNorm


def build(config: TransformerConfig, te: bool) -> BlockModule:
    """Return the classes of the block."""
    if te:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_submodules

        layer = get_gpt_layer_with_transformer_engine_submodules()
        return BlockModule(layer.pre_mlp_layernorm, layer.mlp, {})
    linears = mlp_submodules(te=False, adapted=config.lora.rank > 0)
    module = partial(MLP.as_mlp_submodule, submodules=linears)
    return BlockModule(TorchNorm, module, {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"})


def mlp_submodules(te: bool, adapted: bool = False) -> MLPSubmodules:
    """Return the linear layers of a feed-forward block without a norm (projectors, experts). `adapted` ones are never
    Transformer Engine's."""
    if te and not adapted:
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

        return MLPSubmodules(linear_fc1=TEColumnParallelLinear, linear_fc2=TERowParallelLinear)
    column, row = linear_classes(adapted)
    return MLPSubmodules(linear_fc1=column, linear_fc2=row)
