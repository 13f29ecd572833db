"""GLM-4 and the language model of GLM-4.1V: half of each head rotates, neighbours together; GLM-4-0414 and 4.1V have
norms around both blocks."""

from dataclasses import replace

from mimo_train.families.base import NAMES, Family, Names
from mimo_train.families.rope import Rope
from mimo_train.families.usual import DECODER, Biases
from mimo_train.families.windows import Windows

_NAMES: Names = {**NAMES, "mlp": {"fused": "mlp.gate_up_proj", "down": "mlp.down_proj"}}

GLM = Family(
    "glm",
    "GlmForCausalLM",
    DECODER
    | {
        "vocab_size": 151552,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
    },
    (Windows(), Rope(partial=0.5), Biases(qkv="attention_bias")),
    names=_NAMES,
    always={"rope_interleaved": True},
)
GLM4 = replace(
    GLM,
    type="glm4",
    architecture="Glm4ForCausalLM",
    names={
        **_NAMES,
        "norms": {
            **NAMES["norms"],
            "self_attn_bda.norm": "post_self_attn_layernorm",
            "mlp_bda.norm": "post_mlp_layernorm",
        },
    },
    always={"rope_interleaved": True, "post_norms": True},
)
GLM4V_TEXT = replace(
    GLM4,
    type="glm4v_text",
    architecture="",
    defaults={**GLM.defaults, "head_dim": None, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5},
    spellings=(Windows(), Rope(partial=1.0, axes=(8, 12, 12))),
    always={**GLM4.always, "qkv_bias": True},
)
