"""OLMo 2 and 3: norms behind both blocks alone, and over all heads of queries and of keys, which OLMoE has too."""

from dataclasses import replace

from mimo_train.families.base import NAMES, Config, Family
from mimo_train.families.rope import Rope, TwoRopes
from mimo_train.families.usual import ATTENTION_BIAS, QwenExperts
from mimo_train.families.windows import Windows


def _three_of_four(config: Config, layer: int) -> bool:
    return (layer + 1) % 4 > 0


OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    (Windows(), Rope(), ATTENTION_BIAS),
    names={
        **NAMES,
        "norms": {"self_attn_bda.norm": "post_attention_layernorm", "mlp_bda.norm": "post_feedforward_layernorm"},
    },
    always={"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_over_heads": True},
)
OLMO3 = replace(
    OLMO2,
    type="olmo3",
    architecture="Olmo3ForCausalLM",
    spellings=(Windows(_three_of_four, by_layer=True), TwoRopes(5e5, local_theta=5e5), ATTENTION_BIAS),
)
OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    (Windows(), Rope(), ATTENTION_BIAS, QwenExperts("num_experts")),
    always={"qk_norm": True, "qk_norm_over_heads": True},
    # All layers have experts, of the width that others have without.
    aliases={"num_local_experts": "num_experts", "intermediate_size": "moe_intermediate_size"},
    ignored=("moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers"),
    defaults={"decoder_sparse_step": 1, "mlp_only_layers": None},
    never={"clip_qkv": (None,)},
)
