"""Every default for an absent key of config.json or of a preprocessor is that of its class in transformers."""

import copy
import json
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from encoders.registry import FAMILIES as ENCODERS
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.pretrained import fill_in
from mimo_train.config.pretrained.composites import COMPOSITES
from mimo_train.config.pretrained.composites.of_transformers import of_transformers
from mimo_train.config.pretrained.directory import Directory
from mimo_train.families.config_json import language_keys
from mimo_train.families.registry import FAMILIES
from mimo_train.hf.directory import _BOTH_KINDS

SIZES = {
    "hidden_size": 192, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 20, "intermediate_size": 70,
    "num_hidden_layers": 5, "vocab_size": 77, "max_position_embeddings": 99, "rms_norm_eps": 1e-4,
    "tie_word_embeddings": True, "initializer_range": 0.5, "attention_bias": True, "mlp_bias": True,
    "sliding_window": 9, "rope_theta": 55.0,
}  # fmt: skip
WINDOWS = {"use_sliding_window": True, "max_window_layers": 2}
EXPERTS = {"num_experts_per_tok": 3}
QWEN_MOE = {"num_experts": 5, "moe_intermediate_size": 30, "norm_topk_prob": True, "decoder_sparse_step": 2}
QWEN_MOE |= {"mlp_only_layers": [0]}
GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 25, "attn_logit_softcapping": 7.0}
GEMMA |= {"final_logit_softcapping": 8.0, "tie_word_embeddings": False}
SIGMOID = {"num_experts_per_tok": 6, "moe_intermediate_size": 30, "n_routed_experts": 12, "n_shared_experts": 2}
SIGMOID |= {"n_group": 6, "topk_group": 3, "routed_scaling_factor": 1.7, "norm_topk_prob": True}
SIGMOID |= {"first_k_dense_replace": 2}
HY_V3 = {"num_experts": 12, "num_shared_experts": 2, "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "dense"]}
HY_V3 |= {"router_scaling_factor": 1.7, "mlp_bias": False}
LATENT = {"kv_lora_rank": 14, "q_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 12}
LATENT |= {"head_dim": 8, "num_key_value_heads": 8, "attention_bias": False}
SHARED = {"num_experts": 5, "moe_intermediate_size": 30, "shared_expert_intermediate_size": 40}
DELTA = {"full_attention_interval": 2, "linear_num_key_heads": 3, "linear_num_value_heads": 6}
DELTA |= {"linear_key_head_dim": 5, "linear_value_head_dim": 7, "linear_conv_kernel_dim": 3}
DELTA |= {"partial_rotary_factor": 0.5}
ODD = {
    "mixtral": EXPERTS | {"num_local_experts": 5},
    "qwen2": WINDOWS,
    "qwen3": WINDOWS,
    "qwen3_moe": WINDOWS | EXPERTS | QWEN_MOE,
    "seed_oss": {"attention_out_bias": True, "attention_dropout": 0.3, "residual_dropout": 0.3},
    "cwm": {"rope_theta": 1e6, "mlp_bias": False},
    "qwen2_moe": WINDOWS | EXPERTS | QWEN_MOE | {"shared_expert_intermediate_size": 40, "qkv_bias": False},
    "qwen2_5_vl_text": WINDOWS | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 5]}},
    "qwen3_vl_text": {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 5], "mrope_interleaved": True}},
    "glm4_moe": SIGMOID | {"use_qk_norm": True, "partial_rotary_factor": 0.2, "hidden_size": 160},
    "dots1": SIGMOID | {"max_window_layers": 3},
    "hy_v3": HY_V3 | EXPERTS | {"moe_intermediate_size": 30},
    "deepseek_v3": SIGMOID | LATENT,
    "glm4_moe_lite": SIGMOID | LATENT | {"mlp_layer_types": HY_V3["mlp_layer_types"], "first_k_dense_replace": 1},
    "qwen3_omni_moe_text": EXPERTS | QWEN_MOE | {"norm_topk_prob": False},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | EXPERTS | SHARED,
    "qwen3_next": DELTA | EXPERTS | QWEN_MOE | SHARED,
    "smollm3": {"use_sliding_window": True, "no_rope_layers": [1, 0, 0, 1, 1], "no_rope_layer_interval": 2},
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.7,
        "logits_scaling": 5,
    },
    "ernie4_5": {"use_bias": True},
    "glm": {"partial_rotary_factor": 0.2, "attention_bias": False},
    "glm4": {"partial_rotary_factor": 0.2, "attention_bias": False},
    "glm4v_text": {"partial_rotary_factor": 0.2, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 5]}},
    "glm4v_moe_text": SIGMOID
    | {"partial_rotary_factor": 0.2, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 5]}},
    "gpt_oss": EXPERTS | {"num_local_experts": 5, "swiglu_limit": 3.0, "rope_theta": 150000.0},
    "olmo3": {"rope_theta": 5e5},
    "olmoe": {"num_experts": 5, "num_experts_per_tok": 3, "norm_topk_prob": True},
    "exaone4": {"sliding_window_pattern": 2},
    "cohere2": {"logit_scale": 0.7, "layer_norm_eps": 1e-3, "sliding_window_pattern": 2},
    "phi3": {"partial_rotary_factor": 0.6},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA | {"sliding_window_pattern": 2, "rope_local_base_freq": 44.0},
}
"""Keys of a family besides SIZES: none by default."""
ODD["kimi_k2"] = ODD["deepseek_v3"]
ODD["qwen3_vl_moe_text"] = EXPERTS | QWEN_MOE | ODD["qwen3_vl_text"]
ODD["qwen3_omni_moe_text"] |= ODD["qwen3_vl_text"]
ODD |= dict.fromkeys(("qwen2_vl_text", "qwen2_5_omni_text"), ODD["qwen2_5_vl_text"])
ODD["glm_ocr_text"] = ODD["glm4v_text"]
NEEDED = {
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"), {"rope_scaling"}),
    **dict.fromkeys(("glm4_moe", "glm4v_moe_text"), {"num_experts_per_tok", "topk_group"}),
    "hy_v3": {"num_hidden_layers"},
    "smollm3": {"num_hidden_layers"},
    "deepseek_v3": {"num_experts_per_tok", "topk_group", "num_attention_heads", "num_key_value_heads"},
    "glm4_moe_lite": {
        *("num_experts_per_tok", "topk_group", "num_attention_heads", "num_key_value_heads", "num_hidden_layers"),
    },
    "dots1": {"num_experts_per_tok", "topk_group", "n_routed_experts", "n_shared_experts", "norm_topk_prob"},
}
NEEDED["kimi_k2"] = NEEDED["deepseek_v3"]
WHOLE = {"qwen2_5_vl": {"text_config": {"rope_scaling": ODD["qwen2_5_vl_text"]["rope_scaling"]}}}
"""The same for models of several parts."""


def as_its_class_has_it(config: dict) -> dict:
    """Return the config with everything that its class fills in."""
    own = {key: value for key, value in copy.deepcopy(config).items() if key != "model_type"}
    kind = config["model_type"]
    return CONFIG_MAPPING[{"kimi_k2": "deepseek_v3"}.get(kind, kind)](**own).to_dict()


@pytest.mark.parametrize("kind", FAMILIES)
def test_language_models(kind):
    """Keys are removed one by one from a config in which all have other values, so that no default hides another."""
    odd = {"model_type": kind, **SIZES, **ODD.get(kind, {})}
    bare = {key: odd[key] for key in ("model_type", *NEEDED.get(kind, ()))}
    cases = [bare, odd] + [
        {key: value for key, value in odd.items() if key != left_out}
        for left_out in odd.keys() - {"model_type"} - NEEDED.get(kind, set())
    ]
    rejected = {
        "llama": ["attention_bias"],
        "smollm3": ["attention_bias"],
        "granite": ["attention_bias"],
        "seed_oss": ["attention_out_bias", "attention_dropout", "residual_dropout"],
    }
    for left_out in rejected.get(kind, ()):
        cases.remove({key: value for key, value in odd.items() if key != left_out})
    for config in cases:
        assert language_keys(config) == language_keys(as_its_class_has_it(config)), config


@pytest.mark.parametrize("kind", [kind for family in ENCODERS.values() for kind in family.readers])
def test_encoders(kind):
    family = next(family for family in ENCODERS.values() if kind in family.readers)
    bare = {"model_type": kind}
    assert family.read(bare, {}) == family.read(as_its_class_has_it(bare), {})


@pytest.mark.parametrize("kind", COMPOSITES)
def test_models_of_several_parts(kind):
    bare = {"model_type": kind, **WHOLE.get(kind, {})}
    for name in ([LANGUAGE] if COMPOSITES[kind].language else []) + ["images"]:
        found = [
            fill_in._parts(name, Directory(Path("any"), "pretrained", config))
            for config in (bare, as_its_class_has_it(bare))
        ]
        assert found[0] == found[1], name


PROCESSORS = {
    "clip_vision_model": ("CLIPImageProcessor", {}),
    "siglip_vision_model": ("SiglipImageProcessor", {}),
    "siglip2_vision_model": ("Siglip2ImageProcessor", {}),
    "dinov2": ("BitImageProcessor", {}),
    "dinov3_vit": ("DINOv3ViTImageProcessor", {}),
    "qwen2_5_vl": ("Qwen2VLImageProcessor", {}),
    "qwen3_vl": ("Qwen2VLImageProcessor", {"patch_size": 16}),
    "whisper": ("WhisperFeatureExtractor", {}),
    "qwen2_audio_encoder": ("WhisperFeatureExtractor", {"feature_size": 128}),
}
"""Class by `model_type`, and values that fit the encoder."""


@pytest.mark.parametrize("kind", PROCESSORS)
def test_preprocessors(kind):
    import transformers

    family = next(family for family in ENCODERS.values() if kind in family.readers)
    name, own = PROCESSORS[kind]
    whole = getattr(transformers, name)(**own).to_dict()
    config = {"model_type": kind} | ({"image_size": 224} if "dino" in kind else {})
    assert family.read(config, {"processor_class": name, **own}) == family.read(config, whole)


@pytest.mark.parametrize("name", _BOTH_KINDS)
def test_version_5_reads_both_names_of_a_preprocessor_as_one(name, tmp_path):
    """The name that an export writes, for version 4, and its own."""
    from transformers import AutoImageProcessor

    for kind in (f"{name}ImageProcessor", f"{name}ImageProcessorFast"):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": kind}))
        assert type(AutoImageProcessor.from_pretrained(tmp_path)).__name__ == f"{name}ImageProcessor"


def test_a_class_of_several_parts_sets_defaults_of_its_language_model(tmp_path):
    config = {
        "model_type": "voxtral",
        "text_config": {"num_hidden_layers": 1},
        "audio_config": {"num_hidden_layers": 1},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    keys = language_keys(of_transformers(tmp_path).part(config, "language"))
    assert (keys["rope_base"], keys["layernorm_epsilon"], keys["num_layers"]) == (1e8, 1e-5, 1), "not those of Llama"
