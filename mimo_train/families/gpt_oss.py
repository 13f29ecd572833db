"""GPT-OSS: sinks in attention, windows in every second layer, biases everywhere, a clamped gate."""

from collections.abc import Iterator
from dataclasses import dataclass

from mimo_train.config.errors import Fault
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.families.base import NAMES, Config, Family, Keys, Spelling, fault
from mimo_train.families.rope import Rope
from mimo_train.families.usual import SoftmaxExperts
from mimo_train.families.windows import Windows


def _even(config: Config, layer: int) -> bool:
    return layer % 2 == 0


@dataclass(frozen=True)
class ClampedGate(Spelling):
    """The bounds of the inputs of a gated block. `hidden_act` names another function than the one computed. Weights in
    MXFP4 are read in bf16, and trained and exported so."""

    supports = ("quantization_config",)

    def faults(self, config: Config) -> Iterator[Fault]:
        limit = config["swiglu_limit"]
        if type(limit) not in (int, float) or limit <= 0:
            yield fault("swiglu_limit", limit, "a number above 0 is needed")
        method = (config.get("quantization_config") or {"quant_method": "mxfp4"}).get("quant_method")
        if method != "mxfp4":
            yield fault("quant_method", method, "the only quantised weights that can be read are mxfp4")

    def read(self, config: Config, keys: Keys) -> Keys:
        return {"activation_clamp": float(config["swiglu_limit"])}

    def write(self, spec: LlmSpec) -> Keys:
        return {"swiglu_limit": spec.activation_clamp, "hidden_act": "silu", "attention_bias": True}


GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    (Windows(_even, by_layer=True), Rope(150000.0), SoftmaxExperts(), ClampedGate()),
    names={
        **NAMES,
        "attention": {**NAMES["attention"], "sinks": "self_attn.sinks"},
        "experts": {
            "router": "mlp.router",
            "interleaved_up": "mlp.experts.gate_up_proj",
            "stacked_down": "mlp.experts.down_proj",
        },
    },
    always={"bias": True, "attention_sinks": True, "glu_offset": 1.0},
    activations={"silu": "quick_geglu"},
    aliases={"num_experts": "num_local_experts"},
    never={"attention_bias": (True,), "swiglu_alpha": (1.702,)},
    defaults={
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        }
    },
)
