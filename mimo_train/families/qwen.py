"""Qwen2, Qwen2.5 and Qwen3: dense, with experts, and the language models of Qwen-VL."""

from dataclasses import replace

from mimo_train.families.base import NAMES, Config, Family
from mimo_train.families.rope import Rope
from mimo_train.families.usual import ATTENTION_BIAS, Biases, QwenExperts
from mimo_train.families.windows import Windows, every_layer, late_layers


def _every_second(config: Config, layer: int) -> bool:
    return layer % 2 == 0 and layer < config["max_window_layers"]


LATE_WINDOWS = Windows(late_layers, by_layer=True, switched=True)

QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    (LATE_WINDOWS, Rope()),
    always={"qkv_bias": True},
)
QWEN2_5_VL_TEXT = Family(
    "qwen2_5_vl_text",
    "",
    (LATE_WINDOWS, Rope(1e6, axes=())),
    always={"qkv_bias": True},
    ignored=("head_dim",),
)
QWEN2_VL_TEXT = replace(QWEN2_5_VL_TEXT, type="qwen2_vl_text")
QWEN2_5_OMNI_TEXT = replace(
    QWEN2_5_VL_TEXT,
    type="qwen2_5_omni_text",
    ignored=(),
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    (LATE_WINDOWS, Rope(), ATTENTION_BIAS),
    always={"qk_norm": True},
)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    (Windows(every_layer, switched=True), Rope(), ATTENTION_BIAS, QwenExperts()),
    always={"qk_norm": True},
    aliases={"num_experts": "num_local_experts"},
)
QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
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
    (Windows(), Rope(5e5, axes=(24, 20, 20)), ATTENTION_BIAS),
    always={"qk_norm": True, "mrope_interleaved": True},
    defaults={"sliding_window": None},
)
QWEN3_VL_MOE_TEXT = Family(
    "qwen3_vl_moe_text",
    "",
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
    defaults={"norm_topk_prob": True},
)
QWEN3_OMNI_MOE_TEXT = Family(
    "qwen3_omni_moe_text",
    "",
    (Windows(), Rope(1e6, axes=(24, 20, 20)), ATTENTION_BIAS, QwenExperts("num_experts")),
    always={"qk_norm": True, "mrope_interleaved": True},
)
