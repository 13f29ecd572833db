"""GLM-4.5, 4.6 and 4.7, and the language model of GLM-4.5V: half of each head rotates; experts behind a sigmoid
router."""

from dataclasses import dataclass, replace

from mimo_train.config.llm_spec import LlmSpec
from mimo_train.families.base import Config, Family, Keys, Spelling
from mimo_train.families.rope import Rope
from mimo_train.families.sigmoid_experts import CHOICE, SigmoidExperts
from mimo_train.families.usual import NEXT_TOKENS, Biases
from mimo_train.families.windows import Windows


@dataclass(frozen=True)
class HeadNorms(Spelling):
    """Norms of queries and keys, if `use_qk_norm`."""

    @property
    def feature(self) -> str:
        return "`use_qk_norm`"

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
