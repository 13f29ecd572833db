"""Llama, and families that differ from it in windows, biases, rotated channels, dropout or experts."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mimo_train.config.errors import Fault
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.families.base import NAMES, Config, Family, Keys, Spelling, fault
from mimo_train.families.rope import Rope
from mimo_train.families.usual import Biases, SoftmaxExperts
from mimo_train.families.windows import Windows, every_layer

_BY_LAYER = Windows(every_layer, by_layer=True)


def _three_of_four(config: Config, layer: int) -> bool:
    return layer % 4 > 0


LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    (Windows(), Rope(), Biases(qkv="attention_bias", proj="attention_bias", mlp="mlp_bias")),
)
ERNIE4_5 = Family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    (Windows(), Rope(5e5), Biases(qkv="use_bias", proj="use_bias", mlp="use_bias")),
    always={"rope_interleaved": True},
)
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    (Windows(every_layer), Rope()),
)
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    (Windows(every_layer), Rope(1e6), SoftmaxExperts()),
    names={
        **NAMES,
        "experts": {
            "router": "block_sparse_moe.gate",
            "expert": "block_sparse_moe.experts.{}.",
            "gate": "w1",
            "up": "w3",
            "down": "w2",
        },
    },
    aliases={"num_experts": "num_local_experts"},
)
MINISTRAL = replace(MISTRAL, type="ministral", architecture="MinistralForCausalLM", spellings=(_BY_LAYER, Rope()))
CWM = Family(
    "cwm",
    "CwmForCausalLM",
    (Windows(_three_of_four, by_layer=True), Rope(1e6), Biases(mlp="mlp_bias")),
    defaults={
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    },
)


@dataclass(frozen=True)
class Dropout(Spelling):
    """One probability for attention, and for the outputs of attention and feed-forward block. A run here drops
    embeddings too."""

    supports = ("attention_dropout",)

    def faults(self, config: Config) -> Iterator[Fault]:
        both = config["attention_dropout"], config["residual_dropout"]
        if both[0] != both[1]:
            yield fault(
                "residual_dropout", both[1], f"the model here has one with attention_dropout, which is {both[0]}"
            )

    def read(self, config: Config, keys: Keys) -> Keys:
        return {"dropout": float(config["residual_dropout"])}

    def write(self, spec: LlmSpec) -> Keys:
        return dict.fromkeys(("attention_dropout", "residual_dropout"), spec.dropout)


SEED_OSS = Family(
    "seed_oss",
    "SeedOssForCausalLM",
    (Windows(), Rope(), Biases(qkv="attention_bias", proj="attention_out_bias", mlp="mlp_bias"), Dropout()),
)
