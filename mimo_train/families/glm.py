"""GLM-4 and the language models of GLM-4.1V and GLM-OCR: half of each head rotates, neighbours together; all but the
first have norms around both blocks."""

from dataclasses import replace

from mimo_train.families.base import NAMES, Family, Names
from mimo_train.families.rope import Rope
from mimo_train.families.usual import NEXT_TOKENS, Biases
from mimo_train.families.windows import Windows

_NAMES: Names = {**NAMES, "mlp": {"fused": "mlp.gate_up_proj", "down": "mlp.down_proj"}}

GLM = Family(
    "glm",
    "GlmForCausalLM",
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
    defaults={"attention_bias": True},
    spellings=(Windows(), Rope(partial=1.0, axes=(8, 12, 12))),
    always={**GLM4.always, "qkv_bias": True},
)
GLM_OCR_TEXT = replace(GLM4V_TEXT, type="glm_ocr_text", defaults={}, always=GLM4.always, carried=NEXT_TOKENS)
