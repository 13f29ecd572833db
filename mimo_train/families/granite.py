"""Granite: Llama whose embeddings, scores, residual branches and logits are scaled."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mimo_train.config.errors import Fault
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.families.base import Config, Keys, Spelling, fault
from mimo_train.families.llama import LLAMA

_PLAIN = {
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "logits_scaling": "logit_divisor",
}
"""Our keys, by their keys in config.json."""
_SCORES = "attention_multiplier"


@dataclass(frozen=True)
class Multipliers(Spelling):
    """Factors of embeddings, scores and residual branches, and the divisor of logits."""

    def faults(self, config: Config) -> Iterator[Fault]:
        for name in (*_PLAIN, _SCORES):
            if type(config[name]) not in (int, float) or config[name] <= 0:
                yield fault(name, config[name], "a number above 0 is needed")

    def read(self, config: Config, keys: Keys) -> Keys:
        # To 12 digits, with which the square root of its inverse is the multiplier again.
        scale = float(f"{config[_SCORES] ** -2:.12g}")
        return {"attention_scale_size": scale} | {ours: float(config[name]) for name, ours in _PLAIN.items()}

    def write(self, spec: LlmSpec) -> Keys:
        scale = (spec.attention_scale_size or spec.head_width) ** -0.5
        return {_SCORES: scale} | {name: getattr(spec, ours) for name, ours in _PLAIN.items()}


GRANITE = replace(
    LLAMA,
    type="granite",
    architecture="GraniteForCausalLM",
    spellings=(*LLAMA.spellings, Multipliers()),
    scales_media=True,
)
