"""ERNIE 4.5, dense: Llama whose channels rotate with their neighbours."""

from mimo_train.families.base import Family
from mimo_train.families.rope import Rope
from mimo_train.families.usual import DECODER, Biases
from mimo_train.families.windows import Windows

ERNIE4_5 = Family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    DECODER
    | {
        "vocab_size": 103424,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "use_bias": False,
    },
    (Windows(), Rope(5e5), Biases(qkv="use_bias", proj="use_bias", mlp="use_bias")),
    always={"rope_interleaved": True},
)
