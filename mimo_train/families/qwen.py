"""Qwen2, Qwen2.5 and Qwen3: dense, with experts, and the language models of Qwen-VL."""

from dataclasses import replace

from mimo_train.families.base import NAMES, Config, Family
from mimo_train.families.rope import Rope
from mimo_train.families.usual import ATTENTION_BIAS, DECODER, Biases, QwenExperts
from mimo_train.families.windows import Windows, every_layer, late_layers

DEFAULTS = DECODER | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def _every_second(config: Config, layer: int) -> bool:
    return layer % 2 == 0 and layer < config["max_window_layers"]


LATE_WINDOWS = Windows(late_layers, by_layer=True, switched=True)

QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    DEFAULTS,
    (LATE_WINDOWS, Rope()),
    always={"qkv_bias": True},
)
QWEN2_5_VL_TEXT = Family(
    "qwen2_5_vl_text",
    "",
    DEFAULTS
    | {
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_window_layers": 80,
    },
    (LATE_WINDOWS, Rope(1e6, axes=())),
    always={"qkv_bias": True},
    ignored=("head_dim",),
)
QWEN2_VL_TEXT = replace(QWEN2_5_VL_TEXT, type="qwen2_vl_text")
QWEN2_5_OMNI_TEXT = replace(
    QWEN2_5_VL_TEXT,
    type="qwen2_5_omni_text",
    ignored=(),
    defaults=DEFAULTS
    | {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
    },
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    DEFAULTS | {"head_dim": 128},
    (LATE_WINDOWS, Rope(), ATTENTION_BIAS),
    always={"qk_norm": True},
)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    DEFAULTS
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
    (Windows(every_layer, switched=True), Rope(), ATTENTION_BIAS, QwenExperts()),
    always={"qk_norm": True},
    aliases={"num_experts": "num_local_experts"},
)
QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    DEFAULTS
    | {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "qkv_bias": True,
    },
    (
        Windows(_every_second, by_layer=True, switched=True),
        Rope(),
        Biases(qkv="qkv_bias"),
        QwenExperts("num_experts", shared="shared_expert_intermediate_size"),
    ),
    names={
        **NAMES,
        "experts": {**NAMES["experts"], "shared": "mlp.shared_expert.", "shared_gate": "mlp.shared_expert_gate"},
    },
)
QWEN3_VL_TEXT = Family(
    "qwen3_vl_text",
    "",
    DECODER
    | {
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 128000,
        "sliding_window": None,
    },
    (Windows(), Rope(5e5, axes=(24, 20, 20)), ATTENTION_BIAS),
    always={"qk_norm": True, "mrope_interleaved": True},
)
QWEN3_VL_MOE_TEXT = Family(
    "qwen3_vl_moe_text",
    "",
    DECODER
    | {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 128000,
        "tie_word_embeddings": True,
        "num_local_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
    (Windows(), Rope(5e5, axes=(24, 20, 20)), ATTENTION_BIAS, QwenExperts()),
    names={
        **NAMES,
        "experts": {
            "router": "mlp.gate",
            "stacked_up": "mlp.experts.gate_up_proj",
            "stacked_down": "mlp.experts.down_proj",
        },
    },
    always={"qk_norm": True, "mrope_interleaved": True},
    aliases={"num_experts": "num_local_experts"},
    never={"norm_topk_prob": (True,)},
)
QWEN3_OMNI_MOE_TEXT = Family(
    "qwen3_omni_moe_text",
    "",
    DECODER
    | {
        "vocab_size": 3584,
        "hidden_size": 2048,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
    (Windows(), Rope(1e6, axes=(24, 20, 20)), ATTENTION_BIAS, QwenExperts("num_experts")),
    always={"qk_norm": True, "mrope_interleaved": True},
)
