"""Families of language models in `transformers`, and the defaults of their config classes (version 5.23)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """The common properties of a family's models."""

    architecture: str
    """Class of `transformers` with the output layer; empty: none of its own, a part of larger models."""
    defaults: Mapping[str, Any]
    """Defaults of keys that config.json may lack."""
    theta: float = 10000.0
    """Base period of rotary embeddings by default."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `LlmSpec` that every model of the family has."""
    biases: tuple[str, ...] = ()
    """Which of the keys `attention_bias` and `mlp_bias` it has."""
    windows: str = "none"
    """Which layers have a window: `none`, `all` by `sliding_window`, `switched` by `use_sliding_window` too, `layers`
    by `layer_types` too, `alternate` by `layer_types` alone."""
    gemma: bool = False
    """True if it scales and caps scores, and may have two rotary bases."""
    mrope: tuple[int, ...] | None = None
    """Default of `mrope_section`; empty: no default; None: tokens have positions on one axis."""
    experts: str = ""
    """Key of the number of experts; empty: a dense model."""


_Defaults = dict[str, Any]

_COMMON: _Defaults = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_size": 4096,
    "tie_word_embeddings": False,
}
_COMMON |= {"initializer_range": 0.02, "rms_norm_eps": 1e-6, "hidden_act": "silu", "head_dim": None}
_LLAMA = _COMMON | {"vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": None}
_LLAMA |= {"max_position_embeddings": 2048}
_MISTRAL = _COMMON | {"vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8}
_MISTRAL |= {"max_position_embeddings": 131072, "sliding_window": 4096}
_MIXTRAL = _MISTRAL | {"rms_norm_eps": 1e-5, "sliding_window": None, "num_experts_per_tok": 2, "num_local_experts": 8}
_QWEN = _COMMON | {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32}
_QWEN |= {"max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096}
_QWEN |= {"max_window_layers": 28}
_QWEN_MOE = _QWEN | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4}
_QWEN_MOE |= {"num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
_QWEN_MOE |= {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": None}
_QWEN_VL = _QWEN | {"vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80}
_QWEN_VL |= {"num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_window_layers": 80}
_QWEN3_VL = _COMMON | {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "head_dim": 128}
_QWEN3_VL |= {"max_position_embeddings": 128000, "sliding_window": None}
_GEMMA2: _Defaults = {"num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 2304}
_GEMMA2 |= {"intermediate_size": 9216, "head_dim": 256, "vocab_size": 256000, "max_position_embeddings": 8192}
_GEMMA2 |= {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "query_pre_attn_scalar": 256}
_GEMMA2 |= {"initializer_range": 0.02, "rms_norm_eps": 1e-6, "sliding_window": 4096, "sliding_window_pattern": 2}
_GEMMA2 |= {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}
_GEMMA3 = _GEMMA2 | {"vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window_pattern": 6}
_GEMMA3 |= {"final_logit_softcapping": None, "attn_logit_softcapping": None}

_GEMMA = {"zero_centered_norms": True, "post_norms": True, "scale_embeddings": True}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", _LLAMA, biases=("attention_bias", "mlp_bias")),
    "mistral": Family("MistralForCausalLM", _MISTRAL, windows="all"),
    "mixtral": Family("MixtralForCausalLM", _MIXTRAL, 1e6, windows="all", experts="num_local_experts"),
    "qwen2": Family("Qwen2ForCausalLM", _QWEN, always={"qkv_bias": True}, windows="layers"),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _QWEN | {"head_dim": 128},
        always={"qk_norm": True},
        biases=("attention_bias",),
        windows="layers",
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _QWEN_MOE,
        always={"qk_norm": True},
        biases=("attention_bias",),
        windows="switched",
        experts="num_local_experts",
    ),
    "qwen2_5_vl_text": Family("", _QWEN_VL, 1e6, always={"qkv_bias": True}, windows="layers", mrope=()),
    "qwen3_vl_text": Family(
        "",
        _QWEN3_VL,
        5e5,
        always={"qk_norm": True, "mrope_interleaved": True},
        biases=("attention_bias",),
        mrope=(24, 20, 20),
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM", _GEMMA2, always=_GEMMA, biases=("attention_bias",), windows="alternate", gemma=True
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _GEMMA3,
        1e6,
        always=_GEMMA | {"qk_norm": True},
        biases=("attention_bias",),
        windows="alternate",
        gemma=True,
    ),
}
"""By `model_type` of config.json."""
