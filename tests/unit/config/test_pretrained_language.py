"""config.json of language models: both versions' spellings, defaults of classes, and errors by key."""

import dataclasses
import math

import pytest

from mimo_train.config.errors import ConfigError, UserError
from mimo_train.config.llm_spec import LlmSpec, RopeScaling
from mimo_train.config.schema_modules import LayoutConfig
from mimo_train.families import registry
from mimo_train.families.config_json import (
    language_config_json,
    language_keys,
    language_spec,
    model_types,
)
from mimo_train.families.registry import FAMILIES
from mimo_train.families.weights import language_map
from mimo_train.layout.run import config_faults
from tests.unit.configs import changed

ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
KIMI_SCALE = 0.1 * math.log(32) + 1
LLAMA = {"model_type": "llama", "max_position_embeddings": 131072}


def test_both_versions_spell_one_model():
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **ROPE}, "torch_dtype": "bfloat16"}
    new = LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **ROPE}, "dtype": "bfloat16"}
    assert language_keys(old) == language_keys(new) == language_keys(old | new)
    spec = language_spec(old)
    assert spec.rope_base == 5e5 and spec.rope_scaling.kind == "llama3" and spec.rope_scaling.factor == 8


def test_two_kinds_of_layers_have_their_rotary_base_in_either_version():
    old = {"model_type": "gemma3_text", "rope_theta": 2e5, "rope_local_base_freq": 777.0}
    old |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {
        "model_type": "gemma3_text",
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 777.0},
        },
    }
    assert language_keys(old) == language_keys(new)
    spec = language_spec(new)
    assert (spec.rope_base, spec.local_rope_base, spec.window, spec.full_attention_layers) == (
        2e5,
        777.0,
        4096,
        [5, 11, 17, 23],
    )


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        ({"model_type": "llama"}, {"rope_base": 10000.0, "num_query_groups": 32, "head_size": 128, "window": 0}),
        ({"model_type": "mistral"}, {"num_query_groups": 8, "window": 4096, "full_attention_layers": []}),
        ({"model_type": "mixtral"}, {"rope_base": 1e6, "window": 0, "num_experts": 8, "layernorm_epsilon": 1e-5}),
        ({"model_type": "qwen2"}, {"qkv_bias": True, "proj_bias": False, "window": 0, "head_size": 128}),
        ({"model_type": "qwen2", "use_sliding_window": True}, {"full_attention_layers": list(range(28))}),
        ({"model_type": "qwen3", "hidden_size": 1024}, {"head_size": 128, "qk_norm": True}),
        ({"model_type": "qwen3_moe", "num_experts": 16}, {"num_experts": 16, "router_renormalise": False}),
        (
            {"model_type": "qwen3_moe", "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
            {"dense_layers": [0, 2, 3]},
        ),
        ({"model_type": "gemma2", "num_hidden_layers": 3}, {"full_attention_layers": [1], "attention_softcap": 50.0}),
        ({"model_type": "gemma3_text"}, {"rope_base": 1e6, "local_rope_base": 1e4, "attention_softcap": 0.0}),
        (
            {"model_type": "qwen2_5_vl_text", "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
            {"mrope_section": [16, 24, 24], "mrope_interleaved": False, "rope_base": 1e6, "layernorm_epsilon": 1e-5},
        ),
        (
            {"model_type": "qwen3_vl_text"},
            {"mrope_section": [24, 20, 20], "mrope_interleaved": True, "rope_base": 5e5, "head_size": 128},
        ),
        ({"model_type": "smollm3", "num_hidden_layers": 9}, {"no_rope_layers": [3, 7], "rope_base": 2e6, "window": 0}),
        ({"model_type": "granite", "attention_multiplier": 0.0078125}, {"attention_scale_size": 16384.0}),
        ({"model_type": "ernie4_5"}, {"rope_interleaved": True, "rope_base": 5e5, "head_size": 128, "bias": False}),
        ({"model_type": "glm"}, {"rope_interleaved": True, "partial_rotary_factor": 0.5, "qkv_bias": True}),
        ({"model_type": "glm4", "attention_bias": False}, {"post_norms": True, "qkv_bias": False, "head_size": 128}),
        (
            {"model_type": "glm4v_text", "rope_parameters": {"partial_rotary_factor": 0.5}},
            {"mrope_section": [8, 12, 12], "rope_interleaved": True, "partial_rotary_factor": 0.5, "qkv_bias": True},
        ),
        (
            {"model_type": "glm4v_moe_text", "head_dim": 128},
            {"mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5, "qkv_bias": True, "dense_layers": [0]},
        ),
        (
            {"model_type": "gpt_oss", "num_hidden_layers": 4},
            {"full_attention_layers": [1, 3], "activation": "quick_geglu", "activation_clamp": 7.0, "bias": True},
        ),
        ({"model_type": "olmo2"}, {"pre_norms": False, "qk_norm_over_heads": True, "rope_base": 1e4}),
        (
            {"model_type": "olmo3", "num_hidden_layers": 4, "rope_theta": 5e5}
            | {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}},
            {"full_attention_layers": [3], "window": 4096, "rope_base": 5e5, "local_rope_base": 5e5},
        ),
        (
            {"model_type": "cohere2", "num_hidden_layers": 5, "layer_norm_eps": 1e-3, "logit_scale": 0.25},
            {"no_rope_layers": [3], "logit_divisor": 4.0, "layernorm_epsilon": 1e-3, "norm_bias": False},
        ),
        (
            {"model_type": "cohere2", "num_hidden_layers": 3, "sliding_window": None},
            {"no_rope_layers": [0, 1, 2], "window": 0, "parallel_block": True, "normalization": "LayerNorm"},
        ),
        ({"model_type": "glm_ocr_text"}, {"qkv_bias": False, "post_norms": True, "hidden_size": 1024}),
        (
            {"model_type": "olmoe", "intermediate_size": 96, "mlp_only_layers": [0]},
            {"expert_ffn_hidden_size": 96, "dense_layers": [], "router_renormalise": False, "pre_norms": True},
        ),
        (
            {"model_type": "exaone4", "num_hidden_layers": 5},
            {"no_rope_layers": [3], "full_attention_layers": [3], "pre_norms": False, "qk_norm_over_heads": False},
        ),
        ({"model_type": "exaone4", "sliding_window": None}, {"no_rope_layers": [], "window": 0}),
        (
            {"model_type": "exaone4", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2},
            {"no_rope_layers": [0, 1], "window": 0},
        ),
        ({"model_type": "phi3"}, {"partial_rotary_factor": 1.0, "layernorm_epsilon": 1e-5, "head_size": 96}),
        (
            {"model_type": "gemma", "hidden_act": "gelu"},
            {"activation": "geglu", "zero_centered_norms": True, "window": 0},
        ),
        (
            {"model_type": "qwen3_vl_moe_text"},
            {"num_experts": 60, "experts_per_token": 4, "router_renormalise": True, "mrope_interleaved": True},
        ),
        (
            {
                "model_type": "qwen3_omni_moe_text",
                "norm_topk_prob": False,
                "head_dim": 32,
                "rope_scaling": {"interleaved": True, "mrope_section": [8, 4, 4]},
            },
            {"num_experts": 128, "router_renormalise": False, "mrope_section": [8, 4, 4], "rope_base": 1e6},
        ),
        ({"model_type": "cwm", "num_hidden_layers": 6}, {"full_attention_layers": [0, 4], "window": 8192}),
        ({"model_type": "seed_oss"}, {"qkv_bias": True, "proj_bias": False, "dropout": 0.1}),
        ({"model_type": "qwen2_moe"}, {"shared_expert_ffn_hidden_size": 5632, "shared_expert_gate": True, "window": 0}),
        (
            {"model_type": "qwen2_moe", "num_hidden_layers": 5, "use_sliding_window": True, "max_window_layers": 3},
            {"full_attention_layers": [1, 3, 4], "window": 4096},
        ),
        (
            {"model_type": "kimi_k2", "num_hidden_layers": 3, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
            | {"rope_scaling": {"type": "yarn", "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 1.0}}
            | {
                "scoring_func": "sigmoid",
                "topk_method": "noaux_tc",
                "moe_layer_freq": 1,
                "num_nextn_predict_layers": 0,
            },
            {"router_groups": 0, "dense_layers": [0], "kv_lora_rank": 512, "attention_scale_size": 192 / KIMI_SCALE**4},
        ),
        (LLAMA | {"attention_bias": True}, {"bias": False, "qkv_bias": True, "proj_bias": True}),
        (LLAMA | {"attention_bias": True, "mlp_bias": True}, {"bias": True, "qkv_bias": False}),
    ],
)
def test_absent_keys_have_the_defaults_of_their_class(config, keys):
    found = language_keys(config)
    assert {key: found[key] for key in keys} == keys
    assert found.keys() <= {field.name for field in dataclasses.fields(LlmSpec)}
    assert not list(language_spec(config).faults("llm"))


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"linear_num_key_heads": 8}, "linear_num_key_heads"),
        ({"linear_attention_layers": [2]}, "linear_attention_layers"),
        ({"linear_attention_layers": [0], "linear_num_value_heads": 24}, "linear_num_value_heads"),
        ({"linear_attention_layers": [0], "bias": True}, "bias"),
        ({"partial_rotary_factor": 0.1}, "partial_rotary_factor"),
    ],
)
def test_keys_that_do_not_fit_together_are_refused(keys, key):
    assert [fault.key for fault in dataclasses.replace(SPEC, **keys).faults("llm")] == [f"llm.{key}"]


def test_tensor_and_context_parallel_ranks_share_the_key_heads_of_a_delta_net():
    delta = dataclasses.replace(SPEC, linear_attention_layers=[0]).layer(0).mixer
    layouts = [LayoutConfig(tp=tp, cp=cp) for tp, cp in ((16, 1), (4, 4), (8, 4), (2, 1), (6, 1))]
    assert [len(list(delta.layout_faults(layout, "modules.language"))) for layout in layouts] == [0, 0, 1, 0, 1]


def test_a_key_of_its_class_alone_counts():
    gemma = {"model_type": "gemma2", "num_hidden_layers": 4, "sliding_window_pattern": 4}
    assert language_keys(gemma)["full_attention_layers"] == [1, 3]
    olmo = language_spec({"model_type": "olmo3", "rope_local_base_freq": 44.0})
    assert olmo.local_rope_base == 5e5 and "rope_local_base_freq" not in language_config_json(olmo, "olmo3")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "bloom"}, "model_type is 'bloom'"),
        (LLAMA | {"hidden_size": "64"}, "hidden_size is '64': a whole number is needed"),
        (LLAMA | {"num_hidden_layers": None}, "num_hidden_layers is None: a whole number is needed"),
        (LLAMA | {"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6': a number is needed"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
        (LLAMA | {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (LLAMA | {"mlp_bias": True}, "mlp_bias is True"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers is [1, 0]"),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
        ({"model_type": "phi3", "rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
        ({"model_type": "granite", "logits_scaling": 0}, "logits_scaling is 0: a number above 0 is needed"),
        ({"model_type": "granite", "attention_multiplier": None}, "attention_multiplier is None"),
        ({"model_type": "phi3", "embd_pdrop": 0.1}, "embd_pdrop is 0.1"),
        ({"model_type": "exaone4", "sliding_window_pattern": "LLLG"}, "sliding_window_pattern is 'LLLG'"),
        ({"model_type": "cohere2", "sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ({"model_type": "cohere2", "logit_scale": 0}, "logit_scale is 0: a number above 0 is needed"),
        ({"model_type": "gpt_oss", "attention_bias": False}, "attention_bias is False"),
        ({"model_type": "gpt_oss", "swiglu_alpha": 1.0}, "swiglu_alpha is 1.0"),
        ({"model_type": "gpt_oss", "quantization_config": {"quant_method": "fp8"}}, "quant_method is 'fp8'"),
        ({"model_type": "gpt_oss", "swiglu_limit": 0}, "swiglu_limit is 0: a number above 0 is needed"),
        ({"model_type": "cwm", "mlp_bias": True}, "mlp_bias is True"),
        ({"model_type": "qwen3_vl_moe_text", "norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"model_type": "qwen3_vl_moe_text", "num_experts_per_tok": 1}, "would always be 1"),
        ({"model_type": "seed_oss", "attention_dropout": 0.0}, "residual_dropout is 0.1"),
        (LLAMA | {"rope_scaling": {"type": "longrope"}}, "rope_type is 'longrope'"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "needs factor"),
        (LLAMA | {"rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]}}, "mrope_section is [8, 12, 12]"),
        (LLAMA | {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "make them equal"),
        (LLAMA | {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "the same rotary positions"),
        ({"model_type": "qwen2", "num_hidden_layers": 1, "layer_types": ["sliding_attention"]}, "use_sliding_window"),
        ({"model_type": "qwen2", "num_hidden_layers": 1, "layer_types": ["linear_attention"]}, "layer_types is"),
        ({"model_type": "mistral", "num_hidden_layers": 1, "layer_types": ["full_attention"]}, "does not read it"),
        ({"model_type": "qwen2_5_vl_text"}, "mrope_section is []"),
        ({"model_type": "mixtral", "num_experts_per_tok": 1}, "num_experts_per_tok is 1"),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
            "layers with a window",
        ),
        (
            {"model_type": "qwen3_5_text", "num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
            "layer_types is",
        ),
        ({"model_type": "qwen3_5_moe_text", "attn_output_gate": False}, "attn_output_gate is False"),
        ({"model_type": "qwen3_next", "num_experts_per_tok": 1}, "norm_topk_prob is True"),
        ({"model_type": "glm4_moe", "norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"model_type": "glm4_moe", "n_group": 8, "topk_group": 2}, "topk_group is 2: must be half of"),
        ({"model_type": "glm4v_moe_text", "use_qk_norm": True}, "use_qk_norm is True"),
        ({"model_type": "glm4_moe", "scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"model_type": "dots1"}, "n_routed_experts is None"),
        ({"model_type": "hy_v3", "mlp_layer_types": ["dense"]}, "mlp_layer_types is ['dense']"),
        ({"model_type": "hy_v3", "mlp_bias": True}, "mlp_bias is True"),
        ({"model_type": "deepseek_v3", "rope_interleave": False}, "rope_interleave is False"),
        ({"model_type": "deepseek_v3", "attention_bias": True}, "attention_bias is True"),
        ({"model_type": "deepseek_v3", "num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ({"model_type": "glm4_moe_lite", "kv_lora_rank": None}, "kv_lora_rank is None"),
    ],
)
def test_what_cannot_be_built_is_refused_by_its_key(config, says):
    with pytest.raises(ConfigError) as raised:
        language_keys(config)
    assert says in str(raised.value)


SPEC = LlmSpec(num_layers=2, hidden_size=48, num_attention_heads=6, ffn_hidden_size=80, vocab_size=211)
SPEC = dataclasses.replace(SPEC, max_positions=64)
LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
OSS = {"num_experts": 4, "bias": True, "attention_sinks": True, "activation_clamp": 3.0}
COHERE = {"normalization": "LayerNorm", "norm_bias": False, "parallel_block": True, "rope_interleaved": True}
SIGMOID = {"router_score_function": "sigmoid"}


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, ["llama"]),
        ({"window": 8}, ["mistral"]),
        ({"qkv_bias": True}, ["qwen2"]),
        ({"qkv_bias": True, "window": 8, "full_attention_layers": [0]}, ["qwen2"]),
        ({"qk_norm": True}, ["qwen3"]),
        ({"num_experts": 4, "window": 8}, ["mixtral"]),
        ({"num_experts": 4, "qk_norm": True, "dense_layers": [0], "expert_ffn_hidden_size": 24}, ["qwen3_moe"]),
        ({"num_experts": 4, "shared_expert_ffn_hidden_size": 80, "router_bias": True, **SIGMOID}, ["glm4_moe"]),
        ({"no_rope_layers": [1]}, ["smollm3"]),
        ({"partial_rotary_factor": 0.5}, ["phi3"]),
        ({"residual_multiplier": 0.5, "attention_scale_size": 20.0}, ["granite"]),
        ({"rope_interleaved": True, "bias": True}, ["ernie4_5"]),
        ({"rope_interleaved": True, "partial_rotary_factor": 0.5}, ["glm"]),
        ({"rope_interleaved": True, "post_norms": True}, ["glm4"]),
        ({**OSS, "activation": "quick_geglu", "glu_offset": 1.0}, ["gpt_oss"]),
        ({**OSS, "activation": "quick_geglu"}, []),
        ({"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_over_heads": True}, ["olmo2"]),
        ({**COHERE, "window": 8, "no_rope_layers": [1], "full_attention_layers": [1]}, ["cohere2"]),
        ({**COHERE, "window": 8, "no_rope_layers": [0], "full_attention_layers": [1]}, []),
        ({"bias": True, "activation": "gelu"}, []),
        ({"normalization": "LayerNorm"}, []),
        ({"position": "learned"}, []),
        ({"num_experts": 4, "shared_expert_ffn_hidden_size": 8}, []),
    ],
)
def test_a_model_of_ours_finds_its_family(changes, kinds):
    spec = dataclasses.replace(SPEC, layernorm_epsilon=1e-6, **changes)
    found = model_types(spec)
    assert [kind for kind in found if kind in kinds] == kinds and bool(found) == bool(kinds), found
    for kind in found:
        written = language_config_json(spec, kind, "bfloat16")
        assert written["dtype"] == written["torch_dtype"] == "bfloat16"
        rope = written["rope_parameters"]
        assert written["rope_theta"] == rope.get("full_attention", rope)["rope_theta"] == spec.rope_base


def test_what_a_family_has_no_place_for_is_named():
    with pytest.raises(ConfigError) as raised:
        language_config_json(dataclasses.replace(SPEC, window=8, qk_norm=True), "llama")
    assert {fault.key for fault in raised.value.faults} == {
        "modules.language.llm.window",
        "modules.language.llm.qk_norm",
    }
    with pytest.raises(ConfigError, match=r"modules\.language\.llm\.vocab_size: is 0"):
        language_config_json(dataclasses.replace(SPEC, vocab_size=0), "llama")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"full_attention_layers": [0]}, "full_attention_layers"),
        ({"window": 4, "full_attention_layers": [2]}, "full_attention_layers"),
        ({"dense_layers": [1]}, "dense_layers"),
        ({"num_experts": 2, "dense_layers": [0, 1]}, "dense_layers"),
        ({"local_rope_base": 100.0}, "local_rope_base"),
        ({"num_experts": 4, "router_bias": True}, "router_bias"),
        ({"kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 4}, "qk_nope_head_dim"),
        ({**LATENT, "qk_rope_head_dim": 3}, "qk_rope_head_dim"),
        ({**LATENT, "v_head_dim": 9}, "v_head_dim"),
        ({**LATENT, "window": 4}, "window"),
        ({**LATENT, "attention_output_gate": True}, "attention_output_gate"),
        ({"q_lora_rank": 4}, "q_lora_rank"),
        ({"num_experts": 4, **SIGMOID, "router_renormalise": False}, "router_renormalise"),
        ({"num_experts": 4, **SIGMOID, "router_groups": 2}, "router_groups"),
        ({"num_experts": 6, **SIGMOID, "router_groups": 4, "router_groups_per_token": 1}, "router_groups"),
        (
            {"num_experts": 8, "experts_per_token": 3, **SIGMOID, "router_groups": 4, "router_groups_per_token": 2},
            "router_groups_per_token",
        ),
        ({"mrope_section": [1, 2]}, "mrope_section"),
        ({"mrope_section": [1, 1, 1]}, "mrope_section"),
        ({"mrope_section": [1, 1, 2], "position": "learned"}, "mrope_section"),
        ({"mrope_section": [1, 1, 2], "window": 4, "local_rope_base": 100.0}, "mrope_section"),
        ({"mrope_interleaved": True}, "mrope_interleaved"),
        ({"no_rope_layers": [99]}, "no_rope_layers"),
        ({"rope_interleaved": True, "local_rope_base": 9.0, "window": 4}, "rope_interleaved"),
        ({"rope_interleaved": True, "position": "learned"}, "rope_interleaved"),
        ({"attention_sinks": True, "attention_softcap": 2.0}, "attention_sinks"),
        ({"pre_norms": False}, "pre_norms"),
        ({"norm_bias": False}, "norm_bias"),
        ({"parallel_block": True, "post_norms": True}, "parallel_block"),
        ({"qk_norm_over_heads": True}, "qk_norm_over_heads"),
        ({"qk_norm_over_heads": True, "qk_norm": True, "zero_centered_norms": True}, "qk_norm_over_heads"),
        ({"activation": "gelu", "activation_clamp": 2.0}, "activation_clamp"),
        ({"activation": "silu", "glu_offset": 1.0}, "glu_offset"),
        ({"num_experts": 4, "bias": True, "shared_expert_ffn_hidden_size": 8}, "bias"),
        ({"embedding_multiplier": 2.0, "scale_embeddings": True}, "embedding_multiplier"),
        ({"logit_divisor": 2.0, "logit_softcap": 3.0}, "logit_divisor"),
        ({"position": "learned", "no_rope_layers": [0]}, "no_rope_layers"),
        ({"position": "learned", "window": 4, "local_rope_base": 100.0}, "local_rope_base"),
        ({"zero_centered_norms": True, "normalization": "LayerNorm"}, "zero_centered_norms"),
        ({"bias": True, "qkv_bias": True}, "qkv_bias"),
        ({"bias": True, "proj_bias": True}, "proj_bias"),
        ({"head_size": 7}, "head_size"),
        ({"rope_scaling": RopeScaling(kind="linear", beta_fast=16.0)}, "rope_scaling.beta_fast"),
        ({"rope_scaling": RopeScaling(factor=2.0)}, "rope_scaling.factor"),
        ({"rope_scaling": RopeScaling(kind="yarn", factor=2.0)}, "rope_scaling.original_positions"),
        (
            {"rope_scaling": RopeScaling(kind="llama3", original_positions=9, low_frequency_factor=4.0)},
            "rope_scaling.high_frequency_factor",
        ),
        (
            {"rope_scaling": RopeScaling(kind="yarn", original_positions=9, beta_fast=0.5)},
            "rope_scaling.beta_fast",
        ),
        ({"max_positions": 0, "rope_scaling": RopeScaling(kind="dynamic")}, "max_positions"),
        ({"position": "learned", "rope_scaling": RopeScaling(kind="linear", factor=2.0)}, "rope_scaling.kind"),
    ],
)
def test_options_that_mean_nothing_are_faults(changes, key):
    assert not list(SPEC.faults("llm"))
    assert [fault.key for fault in dataclasses.replace(SPEC, **changes).faults("llm")] == [f"llm.{key}"]


def test_sequences_beyond_dynamic_positions_are_refused():
    values = {"modules.language.llm.rope_scaling": RopeScaling(kind="dynamic", factor=2.0)}
    for positions, wrong in ((96, []), (95, ["data.sequence_length"])):
        cfg = changed(values | {"modules.language.llm.max_positions": positions})
        assert [fault.key for fault in config_faults(cfg)] == wrong


class Point:
    """An entry point of an installed package."""

    def __init__(self, name: str, value: str, family: object):
        self.name, self.value, self._family = name, value, family

    def load(self) -> object:
        if isinstance(self._family, Exception):
            raise self._family
        return self._family


def test_a_family_without_a_class_of_transformers_needs_its_sizes(monkeypatch):
    monkeypatch.setitem(registry.FAMILIES, "alone", dataclasses.replace(FAMILIES["llama"], type="alone"))
    with pytest.raises(ConfigError, match="hidden_size is None: a whole number is needed"):
        language_keys({"model_type": "alone"})


TWIN = dataclasses.replace(FAMILIES["llama"], type="twin", config_type="llama")


@pytest.mark.parametrize(
    ("points", "kind", "says"),
    [
        ([Point("twin", "package:TWIN", TWIN)], "twin", ""),
        ([Point("twin", "package:TWIN", TWIN)], "bloom", "llama, .*, twin"),
        ([Point("llama", "package:TWIN", TWIN)], "llama", "mimo-train and package:TWIN register it"),
        ([Point("twin", "a:TWIN", TWIN), Point("twin", "b:TWIN", TWIN)], "twin", "a:TWIN and b:TWIN register it"),
        ([Point("other", "package:TWIN", TWIN)], "other", "of this type, is 'twin'"),
        ([Point("twin", "package:TWIN", ImportError("no package"))], "twin", "package:TWIN fails: ImportError"),
    ],
)
def test_a_package_registers_a_family(points, kind, says, monkeypatch):
    named = lambda group, name=None: [point for point in points if name in (None, point.name)]  # noqa: E731
    monkeypatch.setattr(registry, "entry_points", named)
    registry._installed.cache_clear()
    try:
        if says:
            with pytest.raises(UserError, match=says):
                registry.family_of(kind)
        else:
            assert language_keys({"model_type": kind}) == language_keys({"model_type": "llama"})
            assert language_map(SPEC, 256, kind) == language_map(SPEC, 256, "llama")
    finally:
        registry._installed.cache_clear()
