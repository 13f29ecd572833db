"""Layers of ours refuse options of Megatron-Core that they would otherwise ignore, by their names."""

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from mimo_train.config.errors import UserError
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.schema_modules import LoraConfig
from mimo_train.models.attention import SdpaAttention, WindowAttention
from mimo_train.models.encoder_module import resampler
from mimo_train.models.layers import layer_spec, mlp_submodules
from mimo_train.models.lora import LoraColumnParallelLinear
from mimo_train.models.norms import TorchNorm
from mimo_train.models.rotary import AxisRotaryEmbedding


def config(**options) -> TransformerConfig:
    """With options that are set after the core has looked at the others, as some of our own are."""
    found = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, persist_layer_norm=False)
    for name, value in options.items():
        setattr(found, name, value)
    return found


def attention(kind: type = SdpaAttention, mask=AttnMaskType.causal, self_or_cross="self", options=None, **keywords):
    groups = ProcessGroupCollection()
    return kind(config(**options or {}), 1, mask, self_or_cross, pg_collection=groups, **keywords)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window_size": (3, 1)}, r"window_size is \(3, 1\): its second number must be 0"),
        ({"window_size": (3, -1)}, r"window_size is \(3, -1\)"),
        (
            {"softmax_type": "learnable"},
            "SdpaAttention has no softmax_type, which is 'learnable': leave it at 'vanilla'",
        ),
        ({"softmax_type": "off-by-one"}, "softmax_type"),
        ({"qk_clip": True}, "qk_clip"),
        ({"log_max_attention_logit": True}, "log_max_attention_logit"),
        ({"apply_query_key_layer_scaling": True}, "apply_query_key_layer_scaling"),
    ],
)
def test_attention_refuses_options(options, words):
    attention(options={"window_size": (3, 0)})
    with pytest.raises(UserError, match=words):
        attention(options=options)


def test_attention_refuses_arguments():
    for keywords, words in (
        ({"cp_comm_type": "a2a"}, "cp_comm_type is 'a2a'"),
        ({"self_or_cross": "cross"}, "'cross'"),
    ):
        with pytest.raises(UserError, match=words):
            attention(**keywords)
    with pytest.raises(TypeError, match="k_channels"):
        attention(k_channels=4)
    with pytest.raises(UserError, match="WindowAttention has no softmax_type"):
        options = {"full_attention": [], "softmax_type": "learnable"}
        attention(WindowAttention, AttnMaskType.no_mask, options=options)


def test_attention_refuses_masks_that_it_does_not_apply():
    states = torch.zeros(3, 1, 2, 4)
    with pytest.raises(
        UserError, match=r"without a causal mask has none, and gets one of torch.Size\(\[1, 1, 3, 3\]\)"
    ):
        attention(mask=AttnMaskType.no_mask)(states, states, states, torch.ones(1, 1, 3, 3, dtype=torch.bool))
    with pytest.raises(UserError, match="the pass asks for AttnMaskType.padding"):
        attention()(states, states, states, attn_mask_type=AttnMaskType.padding)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"persist_layer_norm": True}, "TorchNorm has no persist_layer_norm"),
        ({"memory_efficient_layer_norm": True}, "memory_efficient_layer_norm"),
        ({"normalization": "L2Norm"}, "has no normalization, which is 'L2Norm': leave it at 'LayerNorm'"),
        ({"layernorm_zero_centered_gamma": True}, "layernorm_zero_centered_gamma has no normalization"),
    ],
)
def test_norms_refuse_options(options, words):
    assert TorchNorm(config(), 8).weight.shape == (8,)
    with pytest.raises(UserError, match=words):
        TorchNorm(config(**options), 8)
    with pytest.raises(TypeError, match="zero_centered_gamma"):
        TorchNorm(config(), 8, zero_centered_gamma=True)


def test_rotary_embeddings_turn_by_their_own_sections():
    angles = AxisRotaryEmbedding(LlmSpec(hidden_size=8, num_attention_heads=1, mrope_section=[2, 1, 1]), _Alone())
    positions = torch.zeros(3, 1, 2, dtype=torch.long)
    assert angles(positions, [2, 1, 1]).shape == (2, 1, 1, 8)
    with pytest.raises(AssertionError, match=r"\[1, 2, 1\]"):
        angles(positions, [1, 2, 1])


class _Alone:
    """A group of one rank."""

    def size(self) -> int:
        return 1


@pytest.mark.parametrize("option", ["hidden_dropout", "attention_dropout", "qk_layernorm", "add_bias_linear"])
def test_resamplers_refuse_options(option):
    none = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "qk_layernorm": False, "add_bias_linear": False}
    with pytest.raises(UserError, match=f"PerceiverResampler has no {option}, which is"):
        resampler(config(**none | {option: 0.1 if "dropout" in option else True}), 2, TorchNorm, None)


def test_layers_with_adapters_or_windows_are_of_torch_where_transformer_engine_is():
    """Its linear layers take no adapters. It is not installed here: to ask for its layers would fail."""
    for own in ({"lora": LoraConfig(rank=2)}, {"lora": LoraConfig(), "full_attention": [0]}):
        parts = layer_spec(config(**own), AttnMaskType.no_mask, te=True).submodules
        linear = parts.self_attention.submodules.linear_qkv
        assert issubclass(linear, LoraColumnParallelLinear if own["lora"].rank else ColumnParallelLinear)
    assert mlp_submodules(te=True, adapted=True).linear_fc1 is LoraColumnParallelLinear
