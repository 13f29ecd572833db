"""DeepSeek-V3, whose attention GLM-4.7-Flash and router dots.llm1 and Hunyuan 3 have too."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mimo_train.config.errors import Fault
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.families.base import NAMES, Config, Family, Keys, Spelling, fault
from mimo_train.families.rope import Rope
from mimo_train.families.sigmoid_experts import CHOICE, SigmoidExperts
from mimo_train.families.usual import ATTENTION_BIAS, NEXT_TOKENS
from mimo_train.families.windows import Windows, late_layers


@dataclass(frozen=True)
class LatentHeads(Spelling):
    """Latent attention. Its scores are multiplied by the square of the temperature of `mscale_all_dim`."""

    def faults(self, config: Config) -> Iterator[Fault]:
        heads = config["num_attention_heads"]
        if config["num_key_value_heads"] not in (None, heads):
            yield fault("num_key_value_heads", config["num_key_value_heads"], f"latent attention has all {heads} heads")
        for name in _LATENT:
            if type(config[name]) is not int and not (name == "q_lora_rank" and config[name] is None):
                yield fault(name, config[name], "a whole number is needed")

    def read(self, config: Config, keys: Keys) -> Keys:
        sizes = {name: config[name] or 0 for name in _LATENT}
        scaling, width = keys["rope_scaling"], sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]
        temperature = 1.0
        if scaling["kind"] != "default" and scaling["mscale_all_dim"] and scaling["factor"] > 1:
            temperature = 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1
        scale_size = width / temperature**4 if temperature != 1 else 0.0
        return {**sizes, "num_query_groups": 0, "head_size": 0, "attention_scale_size": scale_size}

    def write(self, spec: LlmSpec) -> Keys:
        sizes = {name: getattr(spec, name) for name in _LATENT}
        # In transformers `head_dim` is the number of channels that rotate.
        return sizes | {"q_lora_rank": spec.q_lora_rank or None, "head_dim": spec.qk_rope_head_dim, **_LATENT_NEVER}


_LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_LATENT_NEVER: Keys = {"rope_interleave": True, "attention_bias": False}
NEVER = {**CHOICE, **{name: (value,) for name, value in _LATENT_NEVER.items()}}

DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    (Windows(), Rope(), LatentHeads(), SigmoidExperts(first_dense="first_k_dense_replace")),
    aliases={"num_local_experts": "n_routed_experts"},
    never=NEVER,
    carried=NEXT_TOKENS,
)
KIMI_K2 = replace(DEEPSEEK_V3, type="kimi_k2", config_type="deepseek_v3")
"""DeepSeek-V3's class by another `model_type`, which directories bring along as code."""

GLM4_MOE_LITE = Family(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    (Windows(), Rope(), LatentHeads(), SigmoidExperts()),
    aliases={"num_local_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"},
    never={**NEVER, "first_k_dense_replace": (None, 1)},
    carried=NEXT_TOKENS,
)
DOTS1 = Family(
    "dots1",
    "Dots1ForCausalLM",
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
