"""Llama, and the Mistral models that differ in windows and experts."""

from mimo_train.families.base import NAMES, Family
from mimo_train.families.rope import Rope
from mimo_train.families.usual import DECODER, Biases, SoftmaxExperts
from mimo_train.families.windows import Windows, every_layer

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
