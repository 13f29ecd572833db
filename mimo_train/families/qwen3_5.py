"""Qwen3.5, Qwen3.6 and Qwen3-Next: Gated DeltaNet in most layers, attention with an output gate in the others."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mimo_train.config.errors import Fault
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.families.base import NAMES, Config, Family, Keys, Names, Spelling, fault
from mimo_train.families.rope import Rope
from mimo_train.families.usual import ATTENTION_BIAS, QwenExperts
from mimo_train.families.windows import FULL

LINEAR = "linear_attention"
"""Kind of layers in `layer_types`."""
_SIZES = (
    *("linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"),
)


@dataclass(frozen=True)
class DeltaLayers(Spelling):
    """Layers with Gated DeltaNet: all but every layer of number `full_attention_interval`, unless `layer_types` says
    it."""

    def faults(self, config: Config) -> Iterator[Fault]:
        kinds, layers = config.get("layer_types"), config["num_hidden_layers"]
        if kinds is not None and (len(kinds) != layers or set(kinds) - {FULL, LINEAR}):
            yield fault("layer_types", kinds, f"one of {FULL} and {LINEAR} for each of {layers} layers can be built")

    def read(self, config: Config, keys: Keys) -> Keys:
        kinds, every = config.get("layer_types"), config["full_attention_interval"]
        layers = range(config["num_hidden_layers"])
        linear = [n for n in layers if (kinds[n] == LINEAR if kinds is not None else (n + 1) % every)]
        return {"linear_attention_layers": linear, **{name: config[name] for name in _SIZES}}

    def write(self, spec: LlmSpec) -> Keys:
        kinds = [LINEAR if layer in spec.linear_attention_layers else FULL for layer in range(spec.num_layers)]
        return {"layer_types": kinds, **{name: getattr(spec, name) for name in _SIZES}}


_NAMES: Names = {
    **NAMES,
    "delta": {
        **{name: f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a")},
        **{name: f"linear_attn.{name}" for name in ("dt_bias", "A_log", "norm")},
        "conv": "linear_attn.conv1d",
        "out": "linear_attn.out_proj",
    },
    "experts": {**NAMES["experts"], "shared": "mlp.shared_expert.", "shared_gate": "mlp.shared_expert_gate"},
}
_BY_KEY_HEAD: Names = {
    **_NAMES,
    "delta": {**_NAMES["delta"], **{name: f"linear_attn.in_proj_{name}" for name in ("qkvz", "ba")}},
}
_EXPERTS = QwenExperts("num_experts", shared="shared_expert_intermediate_size")

QWEN3_5_TEXT = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    (DeltaLayers(), Rope(axes=(11, 11, 10), partial=0.25), ATTENTION_BIAS),
    names=_NAMES,
    always={
        "zero_centered_norms": True,
        "qk_norm": True,
        "attention_output_gate": True,
        "mrope_interleaved": True,
    },
    never={"attn_output_gate": (True,), "hidden_act": ("silu", "swish")},
    # Layers that predict further tokens.
    carried=("mtp.*",),
    defaults={"full_attention_interval": 4},
)
QWEN3_5_MOE_TEXT = replace(
    QWEN3_5_TEXT,
    type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    defaults={
        "intermediate_size": 12288,
        "full_attention_interval": 4,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    },
    spellings=(*QWEN3_5_TEXT.spellings, _EXPERTS),
    ignored=("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"),
)
QWEN3_NEXT = replace(
    QWEN3_5_MOE_TEXT,
    type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    defaults={"full_attention_interval": 4},
    spellings=(DeltaLayers(), Rope(partial=0.25), ATTENTION_BIAS, _EXPERTS),
    names=_BY_KEY_HEAD,
    always={name: True for name in QWEN3_5_TEXT.always if name != "mrope_interleaved"},
    ignored=(),
)
