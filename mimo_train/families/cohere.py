"""Cohere's Command R7B and A: attention and feed-forward block behind one norm; layers that attend to all tokens see no
positions."""

from collections.abc import Iterator
from dataclasses import dataclass

from mimo_train.config.errors import Fault
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.families.base import NAMES, Config, Family, Keys, Spelling, fault
from mimo_train.families.rope import Rope
from mimo_train.families.usual import ATTENTION_BIAS
from mimo_train.families.windows import Windows, pattern_layers


@dataclass(frozen=True)
class CohereLayers(Spelling):
    """The factor of logits, and the name of the norms' epsilon. Only layers with a window rotate."""

    def faults(self, config: Config) -> Iterator[Fault]:
        scale = config["logit_scale"]
        if type(scale) not in (int, float) or scale <= 0:
            yield fault("logit_scale", scale, "a number above 0 is needed")

    def read(self, config: Config, keys: Keys) -> Keys:
        without = keys["full_attention_layers"] if keys["window"] else list(range(config["num_hidden_layers"]))
        # To 12 digits, with which the inverse is the scale again.
        return {"no_rope_layers": without, "logit_divisor": float(f"{1 / config['logit_scale']:.12g}")}

    def write(self, spec: LlmSpec) -> Keys:
        return {"logit_scale": 1 / spec.logit_divisor, "layer_norm_eps": spec.layernorm_epsilon}


COHERE2 = Family(
    "cohere2",
    "Cohere2ForCausalLM",
    (Windows(pattern_layers, by_layer=True), Rope(), ATTENTION_BIAS, CohereLayers()),
    names={**NAMES, "norms": {"input_layernorm": "input_layernorm"}},
    always={"normalization": "LayerNorm", "norm_bias": False, "parallel_block": True, "rope_interleaved": True},
    aliases={"layer_norm_eps": "rms_norm_eps"},
    ignored=("rms_norm_eps",),
    defaults={"sliding_window_pattern": 4},
)
