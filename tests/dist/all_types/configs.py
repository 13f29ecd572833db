"""Tiny configs of any type of transformers: sizes by the names of keys, and what this rule gets wrong, by type."""

from collections.abc import Callable
from typing import Any

LAYERS = 2
WIDTH, HEADS, HEAD = 64, 4, 16
_BY_SIZE = {
    WIDTH: """hidden_size d_model embed_dim n_embd width out_hidden_size projection_dim output_dim text_hidden_size
        proj_dim projector_hidden_size connector_hidden_size adapter_hidden_size projection_hidden_size
        vision_output_dim projector_input_dim projector_output_dim encoder_hidden_size vision_hidden_size
        projection_size text_dim vision_embed_dim hidden_dim input_hidden_size output_hidden_size audio_hidden_size
        vision_dim image_feature_size hidden_channels word_embed_proj_dim lru_width emb_dim embedding_dim
        router_hidden_size""",
    LAYERS: """num_hidden_layers num_layers depth encoder_layers decoder_layers n_layer num_encoder_layers
        num_decoder_layers block_count n_layers num_experts_per_tok num_experts_per_token moe_k moe_topk
        linear_num_key_heads index_n_heads num_key_value_heads indexer_n_heads""",
    HEADS: """num_attention_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads n_head
        n_heads num_experts num_local_experts n_routed_experts moe_num_experts linear_num_value_heads
        mamba_num_heads linear_num_heads""",
    8: "mamba_n_heads n_mamba_heads",
    HEAD: """head_dim attention_head_dim global_head_dim swa_head_dim kv_channels qk_nope_head_dim qk_rope_head_dim
        v_head_dim linear_key_head_dim linear_value_head_dim mamba_head_dim mamba_d_head ssm_state_size mamba_d_state
        index_head_dim hidden_size_per_layer_input rotary_dim state_size linear_head_dim mamba_headdim d_head
        attention_head_size indexer_head_dim""",
    128: """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size mlp_dim dim_feedforward
        intermediate_size_mlp d_ff projector_ffn merger_intermediate_size n_inner dim_ff d_inner feed_forward_size
        attention_hidden_size""",
    32: """moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size
        shared_intermediate_size expert_ffn_hidden_size q_lora_rank kv_lora_rank qk_head_dim""",
    1: "n_group topk_group num_expert_group n_shared_experts first_k_dense_replace",
    5: "conv_kernel_size",
    # Scores of tiny indexers are often zero, and which of equal ones are the largest depends on the length.
    8192: "max_position_embeddings index_topk",
}
SIZES = {name: size for size, names in _BY_SIZE.items() for name in names.split()}
NEEDED = ("head_dim", "num_key_value_heads", "n_routed_experts", "num_experts_per_tok", "n_shared_experts")
"""Keys that may be null, which their classes do not take."""
DROPPED = ("dropout", "layerdrop", "drop_path", "pdrop", "jitter")
"""Parts of the names of keys that draw random numbers."""
OF_LAYERS = """layer_types mlp_layer_types no_rope_layers layers_block_type indexer_types attn_type_list
    layer_block_types activation_sparsity_pattern kv_source_layers""".split()
"""Keys with an entry for each layer."""
OF_INDICES = "fullatt_block_indexes deepstack_visual_indexes global_attn_indexes".split()
"""Keys with numbers of layers."""


def shrink(values: dict[str, Any]) -> dict[str, Any]:
    """Give a config and its parts tiny sizes, in place, and return it."""
    same_heads = values.get("num_key_value_heads") == values.get("num_attention_heads", 0)
    for key, value in values.items():
        if not isinstance(key, str):
            continue  # of labels
        if key == "per_layer_config":
            values[key] = {layer: part for layer, part in value.items() if int(layer) < LAYERS}
        elif isinstance(value, dict):
            shrink(value)
        elif any(word in key for word in DROPPED) and isinstance(value, int | float):
            values[key] = type(value)(0)
        elif key in SIZES and isinstance(value, int | float) and not isinstance(value, bool):
            values[key] = SIZES[key] if value else value
        elif key in NEEDED and value is None:
            values[key] = SIZES[key]
        elif key in OF_LAYERS and isinstance(value, list):
            values[key] = _kinds(value) if key == "layer_types" else value[:LAYERS]
        elif key == "intermediate_size" and isinstance(value, list):
            values[key] = [SIZES[key]] * LAYERS
        elif key in OF_INDICES and value:
            values[key] = list(range(min(len(value), LAYERS)))
        elif key == "vision_feature_layers" and isinstance(value, list):
            values[key] = [-2, -1]
    if same_heads:  # latent attention has no groups
        values["num_key_value_heads"] = HEADS
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    for part in (rope, values):
        if isinstance(part.get("mrope_section"), list):
            share = rope.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1
            part["mrope_section"] = _section(part["mrope_section"], int(HEAD * share) // 2)
    return values


def _kinds(layers: list[str]) -> list[str]:
    """Return different kinds of layers, full attention among them."""
    kinds = list(dict.fromkeys(layers))
    chosen = (kinds if len(kinds) >= LAYERS else layers)[:LAYERS]
    if "full_attention" in kinds and "full_attention" not in chosen:
        chosen[-1] = "full_attention"
    return chosen


def _section(old: list[int], half: int) -> list[int]:
    """Return sections of rotary frequencies that sum to `half`."""
    if len(old) == 3 and half == 8:
        return [2, 3, 3] if old[0] <= old[1] else [4, 2, 2]
    first = max(1, half // (len(old) + 1))
    return [first] * (len(old) - 1) + [half - first * (len(old) - 1)]


ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}


def _mrope(*section: int, **more: Any) -> dict[str, Any]:
    return {"text_config.rope_parameters": ROPE | {"mrope_section": list(section)} | more}


_BOTH = {"full_attention": ROPE, "sliding_attention": ROPE}
_INDEXER = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}  # fmt: skip
_GLM = _mrope(2, 3, 3, partial_rotary_factor=1.0)
_DELTA = _mrope(2, 1, 1, partial_rotary_factor=0.5, mrope_interleaved=True)
_TILE = {"vision_config.patch_size": 14, "vision_config.image_size": 364}
FIXES: dict[str, dict[str, Any]] = {
    "aria": {"vision_config.patch_size": 28, "vision_config.image_size": 980},
    "aya_vision": _TILE,
    "cohere_compass": {
        "text_config.rope_parameters": {kind: rope | {"mrope_section": [2, 3, 3]} for kind, rope in _BOTH.items()}
    },
    "deepseek_ocr2": {
        "text_config.mlp_layer_types": ["dense", "sparse"], "vision_config.sam_config.output_channels": 16,
        "vision_config.sam_config.downsample_channels": [32, 64],
    },
    "dots3_note": {
        "text_config.num_key_value_heads": 4, "text_config.head_dim": 32, "vision_config.adapter_in_dim": 64,
        "vision_config.adapter_out_dim": 64, "vision_config.mlp_layer_types": ["dense", "sparse"],
        "vision_config.per_layer_config": {"1": {"num_local_experts": 4, "num_experts_per_tok": 2}},
        "audio_config.adapter_input_size": 64, "audio_config.adapter_out_dim": 64,
    },
    "ernie4_5_vl_moe": _mrope(3, 3, 2),
    "fast_vlm": {"image_seq_length": 16, "vision_config.hidden_size": 3072},
    "fun_asr_nano": {"adaptor_config.intermediate_size": 16},
    "gemma3": {"mm_tokens_per_image": 16},
    "gemma4_unified": {"text_config.use_bidirectional_attention": "vision"},
    "gemma4": {"vision_config.use_clipped_linears": True, "text_config.use_bidirectional_attention": "vision"},
    "gemma3n": {"text_config.num_kv_shared_layers": 0, "vision_config.hidden_size": 2048},
    "glm46v": _GLM, "glm4v": _GLM, "glm_ocr": _GLM, "glmga": _GLM,
    "glm4v_moe": _mrope(1, 1, 2, partial_rotary_factor=0.5),
    "glm5_next": {
        "text_config.num_key_value_heads": 4, "text_config.index_topk": 4096, "text_config.index_kpool": 8,
    },
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1], "downsample_rate": "1/2",
        "vision_config.patch_size": 14, "vision_config.image_size": 336,
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    },
    "granite_docling": _TILE, "idefics3": _TILE, "smolvlm": _TILE,
    "hunyuan_vl": {"text_config.head_dim": 16, **_mrope(2, 2, 2, 2)},
    "kimi_k25": {"text_config.num_key_value_heads": 4},
    "lfm3_vl": {"text_config.rope_parameters": _BOTH},
    "llama4": {"vision_config.intermediate_size": 256},
    "llava_next": {"vision_config.patch_size": 14}, "llava_next_video": {"vision_config.patch_size": 14},
    # Without the merger behind this layer images get features of others.
    "minicpmv4_6": {"vision_config.insert_layer_id": 0, "insert_layer_id": 0, **_DELTA},
    "minicpmv4_7": {"vision_config.insert_layer_id": 0, "insert_layer_id": 0, **_DELTA},
    "minicpm_ocr": _DELTA, "qwen3_5": _DELTA, "qwen3_5_moe": _DELTA,
    "mistral4": {"num_key_value_heads": 4, "head_dim": 32},
    "mistral_large4": {"text_config.num_key_value_heads": 4},
    "molmo2": {"adapter_config.vision_feature_layer": [-1, -2]},
    "muse_glimmer": {"out_hidden_size": 256},
    "muse_spark": {
        "out_hidden_size": 256, "audio_config.num_hidden_layers": 4, "audio_config.hidden_sizes": [64] * 4,
        "audio_config.depths": [1] * 4,
    },
    "nemo_speechlm": {
        "text_config.n_groups": 2, "text_config.layers_block_type": ["linear_attention", "full_attention"],
        "audio_config.diarization_config.head_config.audio_hidden_size": 64,
    },
    "nemotron_h_omni": {
        "text_config.n_groups": 2, "audio_config.projection_hidden_size": 64, "audio_config.projection_bias": False,
    },
    "paligemma": {"vision_config.patch_size": 16, "vision_config.image_size": 224},
    "perception_lm": {
        "projector_pooling_ratio": 2, "vision_config.architecture": "vit_pe_core_tiny_patch16_384",
        "vision_config.do_pooling": False, "vision_config.model_args": {
            "embed_dim": 64, "depth": 2, "num_heads": 4, "img_size": [64, 64], "ref_feat_shape": [4, 4],
            "global_pool": "", "use_post_transformer_norm": False, "init_values": 0.1,
        },
    },
    "qwen2_5_omni": {"thinker_config.text_config.rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}},
    "qwen3_omni_moe": {
        "thinker_config.text_config.rope_parameters": ROPE | {"mrope_section": [2, 3, 3]},
        "talker_config.text_config.shared_expert_intermediate_size": 32, "talker_config.spatial_merge_size": 2,
    },
    "qwen4_exp": {**_mrope(2, 3, 3), **{f"text_config.{key}": value for key, value in _INDEXER.items()}},
    "step3p7": {"text_config.sliding_window": 512},
    "unlimited_ocr": {
        "vision_config.sam_config.output_channels": 16, "vision_config.sam_config.downsample_channels": [32, 64],
    },
    "vibevoice_asr": {
        f"{name}_tokenizer_encoder_config.{key}": value
        for name in ("acoustic", "semantic")
        for key, value in (("num_filters", 4), ("depths", [1] * 7), ("vae_std", 0.0))  # noise would differ
    },
    "voxtral": {"audio_config.intermediate_size": 256, "audio_config.max_source_positions": 1500},
    "vipllava": {"vision_feature_layers": [-2, -1]},
}  # fmt: skip
"""Values by type and key, with the keys of parts before a dot."""
FIXES |= {
    "bamba": {"attn_layer_indices": [1]},
    "dots3_note_text": {"num_key_value_heads": 4, "head_dim": 32},
    "dots1": {"norm_topk_prob": True},
    "falcon_h1": {"mamba_d_ssm": 128},
    "cohere_compass_text": {"rope_parameters": _BOTH},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}, "ffn_config.moe_num_experts": 4},
    "gemma4_text": {"per_layer_config": {"1": {"head_dim": 32}}},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    "laguna": {"num_attention_heads_per_layer": [4, 4]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "mpt": {"attn_config.attn_pdrop": 0},
    "nemotron_h": {"n_groups": 2, "layers_block_type": ["linear_attention", "full_attention"]},
    "qwen4_exp_text": _INDEXER,
    "qwen3_5_moe_text": {"rope_parameters": _DELTA["text_config.rope_parameters"]},
    "qwen3_5_text": {"rope_parameters": _DELTA["text_config.rope_parameters"]},
    "reformer": {"attn_layers": ["local", "local"], "axial_pos_embds": False},
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {
        "attention_head_dim": 32, "layers_block_type": ["linear_attention", "hybrid"], "hybrid_layer_ids": [1],
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""The same of language models alone."""
_AXES = (
    "paddleocr_vl qwen2_5_omni_thinker qwen2_5_vl qwen2_vl qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe cosmos3_omni"
)
FIXES |= {kind: _mrope(2, 3, 3) for kind in _AXES.split()}

PARTS = {
    "gemma4": ("text_config", "vision_config", "audio_config"),
    "gemma4_unified": ("text_config", "vision_config", "audio_config"),
    "nemotron_h_omni": ("audio_config",),
}
"""Parts that are absent from the default config of a type."""


def put(values: dict[str, Any], fixes: dict[str, Any]) -> None:
    """Set values by keys with dots, in place."""
    for key, value in fixes.items():
        *path, last = key.split(".")
        part = values
        for name in path:
            part = part.setdefault(name, {})
        part[last] = value


def tiny_config(kind: str, change: Callable[[dict[str, Any]], None] = lambda values: None) -> Any:
    """Return the config of a type with tiny sizes; `change` changes its values."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind]
    values = shrink(config(**{part: {} for part in PARTS.get(kind, ())}).to_dict())
    put(values, FIXES.get(kind, {}))
    change(values)
    put(values, FIXES.get(kind, {}))
    return config.from_dict(values)
