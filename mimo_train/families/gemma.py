"""Gemma 1 to 3: norms that multiply by 1 + weight, scaled embeddings; from 2 on norms around each block, capped scores
and logits."""

from dataclasses import dataclass

from mimo_train.config.llm_spec import LlmSpec
from mimo_train.families.base import NAMES, Config, Family, Keys, Names, Spelling
from mimo_train.families.rope import Rope, TwoRopes
from mimo_train.families.usual import ATTENTION_BIAS
from mimo_train.families.windows import Windows, pattern_layers


@dataclass(frozen=True)
class Scores(Spelling):
    """The scale of scores, and the caps of scores and logits."""

    def read(self, config: Config, keys: Keys) -> Keys:
        return {
            "attention_scale_size": float(config["query_pre_attn_scalar"]),
            "attention_softcap": float(config.get("attn_logit_softcapping") or 0),
            "logit_softcap": float(config.get("final_logit_softcapping") or 0),
        }

    def write(self, spec: LlmSpec) -> Keys:
        size = spec.attention_scale_size or spec.head_width
        return {
            # transformers expects an integer where it is one.
            "query_pre_attn_scalar": int(size) if size == int(size) else size,
            "attn_logit_softcapping": spec.attention_softcap or None,
            "final_logit_softcapping": spec.logit_softcap or None,
            "use_bidirectional_attention": False,
        }


SANDWICH: Names = {
    **NAMES,
    "norms": {
        "input_layernorm": "input_layernorm",
        "self_attn_bda.norm": "post_attention_layernorm",
        "pre_mlp_layernorm": "pre_feedforward_layernorm",
        "mlp_bda.norm": "post_feedforward_layernorm",
    },
}
ALWAYS = {"zero_centered_norms": True, "post_norms": True, "scale_embeddings": True}
WINDOWS = Windows(pattern_layers, by_layer=True)

GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    (Windows(), Rope(), ATTENTION_BIAS),
    always={"zero_centered_norms": True, "scale_embeddings": True},
    # Early files name the exact form, and mean the tanh form.
    activations={"gelu": "geglu"},
)
GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    (WINDOWS, Rope(), ATTENTION_BIAS, Scores()),
    names=SANDWICH,
    always=ALWAYS,
    activation="hidden_activation",
    ignored=("sliding_window_pattern",),
    scales_media=True,
    defaults={"sliding_window_pattern": 2},
)
GEMMA3_TEXT = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    (WINDOWS, TwoRopes(1e6), ATTENTION_BIAS, Scores()),
    names=SANDWICH,
    always=ALWAYS | {"qk_norm": True},
    activation="hidden_activation",
    defaults={"sliding_window_pattern": 6},
)
