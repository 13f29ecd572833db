"""The interface of a family of language models."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mimo_train.config.errors import ConfigError, Fault
from mimo_train.config.llm_spec import LlmSpec

Config = Mapping[str, Any]
"""The config.json of a language model, or its part of a composite's, with the defaults of its class."""

Keys = dict[str, Any]
"""Keys of `LlmSpec`, or of config.json."""

Names = Mapping[str, Mapping[str, str]]
"""Names of a layer's tensors behind the layer's prefix, without `.weight`: of `norms` by our names, and of each block
by its kind and the names in `Block.rules`."""

NAMES: Names = {
    "norms": {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"},
    "attention": {
        "query": "self_attn.q_proj",
        "key": "self_attn.k_proj",
        "value": "self_attn.v_proj",
        "out": "self_attn.o_proj",
        "query_norm": "self_attn.q_norm",
        "key_norm": "self_attn.k_norm",
    },
    "latent": {
        "q": "self_attn.q_proj",
        "q_down": "self_attn.q_a_proj",
        "q_norm": "self_attn.q_a_layernorm",
        "q_up": "self_attn.q_b_proj",
        "kv_down": "self_attn.kv_a_proj_with_mqa",
        "kv_norm": "self_attn.kv_a_layernorm",
        "kv_up": "self_attn.kv_b_proj",
        "out": "self_attn.o_proj",
    },
    "mlp": {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"},
    "experts": {
        "router": "mlp.gate",
        "router_bias": "mlp.gate.e_score_correction_bias",
        "shared": "mlp.shared_experts.",
        "expert": "mlp.experts.{}.",
        "gate": "gate_proj",
        "up": "up_proj",
        "down": "down_proj",
    },
}
"""Names of most families."""


class Spelling:
    """A spelling of keys of `LlmSpec` in config.json. Subclasses are frozen dataclasses."""

    @property
    def supports(self) -> tuple[str, ...]:
        """Keys of config.json that it reads and other families reject."""
        return ()

    def faults(self, config: Config) -> Iterator[Fault]:
        """Yield unsupported values, by their keys in config.json."""
        yield from ()

    def read(self, config: Config, keys: Keys) -> Keys:
        """Return keys of `LlmSpec`; `keys`: those read so far. Raises ConfigError for unsupported values."""
        return {}

    def write(self, spec: LlmSpec) -> Keys:
        """Return the keys of config.json, in the spellings of versions 4 and 5 of `transformers`."""
        return {}


@dataclass(frozen=True)
class Family:
    """The common properties of the models of one `model_type`."""

    type: str
    """`model_type` in config.json."""
    architecture: str
    """Class of `transformers` with the output layer; empty: none of its own, a part of larger models."""
    spellings: tuple[Spelling, ...]
    """Of the keys that not all families have, in order."""
    defaults: Config = field(default_factory=dict)
    """Defaults of keys that config.json may lack and its class computes: all others are read in the class."""
    config_type: str = ""
    """`model_type` whose class has the defaults, if it has none of its own."""
    names: Names = field(default_factory=lambda: NAMES)
    """Names of the tensors of a layer."""
    always: Keys = field(default_factory=dict)
    """Keys of `LlmSpec` that every model of the family has."""
    activation: str = "hidden_act"
    """Key of the activation function."""
    activations: Mapping[str, str] = field(default_factory=dict)
    """Our activation by a further name of the gate's function."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of keys: alias -> key, if config.json lacks the key."""
    ignored: tuple[str, ...] = ()
    """Keys that its class does not read, though other families do."""
    never: Mapping[str, tuple] = field(default_factory=dict)
    """Supported values of further keys that would change the model."""
    carried: tuple[str, ...] = ("model.layers.*.self_attn.rotary_emb.inv_freq",)
    """Shell patterns of tensors that no parameter needs and an export copies; `{layers}` is the number of layers. By
    default buffers of old versions, which follow from the config."""
    scales_media: bool = False
    """True if its class scales the features of media too in a LLaVA, where ours do not."""


def fault(key: str, value: Any, reason: str) -> Fault:
    """Return the fault of a value in config.json."""
    return Fault("config.json", f"{key} is {value!r}: {reason}")


def rejected(key: str, value: Any, reason: str) -> ConfigError:
    """Return the error of a value in config.json."""
    return ConfigError([fault(key, value, reason)])
