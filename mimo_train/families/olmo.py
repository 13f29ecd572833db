"""Families without norms before blocks: OLMo 2 and 3, whose norms of queries and keys are over all heads, as those of
OLMoE, and EXAONE 4, in which only layers with a window rotate."""

from dataclasses import dataclass, replace

from mimo_train.families.base import NAMES, Config, Family, Keys, Spelling
from mimo_train.families.rope import Rope, TwoRopes
from mimo_train.families.usual import ATTENTION_BIAS, QwenExperts
from mimo_train.families.windows import Windows, pattern_layers


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
    spellings=(Windows(_three_of_four, by_layer=True), TwoRopes(5e5, local_theta=5e5, local_key=""), ATTENTION_BIAS),
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


@dataclass(frozen=True)
class WindowsRotate(Spelling):
    """Layers that attend to all tokens do not rotate, if `sliding_window` is set."""

    def read(self, config: Config, keys: Keys) -> Keys:
        if not config["sliding_window"]:
            return {"no_rope_layers": []}
        layers = list(range(config["num_hidden_layers"]))
        return {"no_rope_layers": keys["full_attention_layers"] if keys["window"] else layers}


EXAONE4 = Family(
    "exaone4",
    "Exaone4ForCausalLM",
    (Windows(pattern_layers, by_layer=True), Rope(), WindowsRotate()),
    names=OLMO2.names,
    always={"pre_norms": False, "post_norms": True, "qk_norm": True},
)
