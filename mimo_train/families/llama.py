"""Llama, and families that differ from it in windows, biases, dropout or experts."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mimo_train.config.errors import Fault
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.families.base import NAMES, Config, Family, Keys, Spelling, fault
from mimo_train.families.rope import Rope
from mimo_train.families.usual import DECODER, Biases, SoftmaxExperts
from mimo_train.families.windows import Windows, every_layer

_BY_LAYER = Windows(every_layer, by_layer=True)


def _three_of_four(config: Config, layer: int) -> bool:
    return layer % 4 > 0


LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    DECODER
    | {
        "vocab_size": 32000,
        "intermediate_size": 11008,
        "num_key_value_heads": None,
        "max_position_embeddings": 2048,
    },
    (Windows(), Rope(), Biases(qkv="attention_bias", proj="attention_bias", mlp="mlp_bias")),
)
MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    DECODER
    | {
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    (Windows(every_layer), Rope()),
)
MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    {
        **MISTRAL.defaults,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
    },
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
    DECODER
    | {
        "vocab_size": 128256,
        "hidden_size": 6144,
        "intermediate_size": 21504,
        "num_hidden_layers": 64,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "sliding_window": 8192,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e6,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    (Windows(_three_of_four, by_layer=True), Rope(1e6), Biases(mlp="mlp_bias")),
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
    DECODER
    | {
        "vocab_size": 155136,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_bias": True,
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
    },
    (Windows(), Rope(), Biases(qkv="attention_bias", proj="attention_out_bias", mlp="mlp_bias"), Dropout()),
)
