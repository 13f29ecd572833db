"""ERNIE 4.5, dense: Llama whose channels rotate with their neighbours."""

from mimo_train.families.base import Family
from mimo_train.families.rope import Rope
from mimo_train.families.usual import Biases
from mimo_train.families.windows import Windows

ERNIE4_5 = Family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    (Windows(), Rope(5e5), Biases(qkv="use_bias", proj="use_bias", mlp="use_bias")),
    always={"rope_interleaved": True},
)
