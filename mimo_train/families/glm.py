"""GLM-4 and the language models of GLM-4.1V and GLM-OCR: half of each head rotates, neighbours together; all but the
first have norms around both blocks. GLM-4.5, 4.6, 4.7 and the language model of GLM-4.5V: experts behind a sigmoid
router."""

from dataclasses import dataclass, replace

from mimo_train.config.llm_spec import LlmSpec
from mimo_train.families.base import NAMES, Config, Family, Keys, Names, Spelling
from mimo_train.families.rope import Rope
from mimo_train.families.sigmoid_experts import CHOICE, SigmoidExperts
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


@dataclass(frozen=True)
class HeadNorms(Spelling):
    """Norms of queries and keys, if `use_qk_norm`."""

    def read(self, config: Config, keys: Keys) -> Keys:
        return {"qk_norm": bool(config["use_qk_norm"])}

    def write(self, spec: LlmSpec) -> Keys:
        return {"use_qk_norm": spec.qk_norm}


_EXPERTS = SigmoidExperts(first_dense="first_k_dense_replace")
GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    (
        Windows(),
        Rope(partial=0.5),
        Biases(qkv="attention_bias"),
        HeadNorms(),
        _EXPERTS,
    ),
    aliases={"num_local_experts": "n_routed_experts"},
    never=CHOICE,
    carried=NEXT_TOKENS,
)
GLM4V_MOE_TEXT = replace(
    GLM4_MOE,
    type="glm4v_moe_text",
    architecture="",
    defaults={"use_qk_norm": False},
    spellings=(Windows(), Rope(axes=(8, 12, 12), partial=0.5), Biases(qkv="attention_bias"), _EXPERTS),
    never={**CHOICE, "use_qk_norm": (False,)},
)
