"""Models with the router of DeepSeek-V3: dots.llm1 and Hunyuan 3."""

from mimo_train.families.base import NAMES, Family
from mimo_train.families.rope import Rope
from mimo_train.families.sigmoid_experts import CHOICE, DEFAULTS, SigmoidExperts
from mimo_train.families.usual import ATTENTION_BIAS, DECODER, NEXT_TOKENS
from mimo_train.families.windows import Windows, late_layers

DOTS1 = Family(
    "dots1",
    "Dots1ForCausalLM",
    DECODER
    | DEFAULTS
    | {
        "vocab_size": 152064,
        "hidden_size": 4608,
        "intermediate_size": 10944,
        "num_hidden_layers": 62,
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "sliding_window": 4096,
        "max_window_layers": 62,
        "n_routed_experts": None,
        "n_shared_experts": None,
        "num_experts_per_tok": None,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "first_k_dense_replace": 0,
    },
    (
        Windows(late_layers, by_layer=True),
        Rope(),
        ATTENTION_BIAS,
        SigmoidExperts(first_dense="first_k_dense_replace"),
    ),
    always={"qk_norm": True},
    aliases={"num_local_experts": "n_routed_experts"},
    never=CHOICE,
)
HY_V3 = Family(
    "hy_v3",
    "HYV3ForCausalLM",
    DECODER
    | {
        "vocab_size": 120832,
        "intermediate_size": 13312,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "initializer_range": 0.006,
        "rms_norm_eps": 1e-5,
        "num_experts": 192,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 1536,
        "router_scaling_factor": 2.826,
    },
    (
        Windows(),
        Rope(11158840.0),
        ATTENTION_BIAS,
        SigmoidExperts("num_experts", "num_shared_experts", "router_scaling_factor", groups=False),
    ),
    names={
        **NAMES,
        "experts": {
            **NAMES["experts"],
            "router": "mlp.router.gate",
            "router_bias": "mlp.expert_bias",
            "shared": "mlp.shared_mlp.",
        },
    },
    always={"qk_norm": True},
    aliases={"num_local_experts": "num_experts"},
    never={**CHOICE, "mlp_bias": (None, False)},
    carried=NEXT_TOKENS,
)
