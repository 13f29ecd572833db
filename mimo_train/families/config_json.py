"""config.json of a language model <-> `LlmSpec`, for the families of `mimo_train.families`.

A missing key has the default of its class in transformers. Spellings of versions 4 and 5 are both read and
written. Unsupported values are rejected with the name of the key.
"""

import dataclasses
from contextlib import suppress
from typing import Any

from encoders.errors import EncoderError
from encoders.pretrained import class_defaults
from mimo_train.config.errors import ConfigError, Fault
from mimo_train.config.llm_spec import LlmSpec, RopeScaling
from mimo_train.config.parts import LANGUAGE
from mimo_train.families.base import Config, Family, Keys, fault
from mimo_train.families.registry import FAMILIES, family_of

ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu"}
"""Our activation, by the name of the gate's function."""

NEVER: dict[str, tuple] = {
    "quantization_config": (None,),
    "use_bidirectional_attention": (None, False),
    "attention_dropout": (None, 0),
    "router_jitter_noise": (None, 0),
    "partial_rotary_factor": (None, 1),
}
"""Supported values of keys that would change the model, unless a spelling of the family reads them."""


def _is_nf4(name: str, value: Any) -> bool:
    """True for weights that bitsandbytes has quantized to NF4, which are read."""
    kind = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return name == "quantization_config" and isinstance(value, dict) and kind.items() <= value.items()


_NUMBERS = {
    int: (
        *("hidden_size", "intermediate_size", "vocab_size", "head_dim", "max_position_embeddings"),
        *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    ),
    float: ("rms_norm_eps", "initializer_range"),
}
"""Keys by the type of their values."""
_DEFAULTS: Keys = {"tie_word_embeddings": False, "initializer_range": 0.02, "hidden_act": "silu"} | dict.fromkeys(
    ("head_dim", "num_key_value_heads")
)
"""Defaults of keys that some classes lack, or do not declare as plain values."""
_MAY_BE_NULL = ("head_dim", "num_key_value_heads")


def language_keys(config: Config) -> Keys:
    """Return the keys of `LlmSpec` from the config.json of a language model, or from its part of a composite's.

    Raises:
        ConfigError: an unsupported family, key or value, by its name in config.json.
    """
    family = family_of(config.get("model_type"))
    config = _with_defaults(family, config)
    faults = [
        fault(name, config.get(name), f"a {'whole number' if kind is int else 'number'} is needed")
        for kind, names in _NUMBERS.items()
        for name in names
        if type(config.get(name)) not in (int, kind) and not (config.get(name) is None and name in _MAY_BE_NULL)
    ]
    if faults:
        raise ConfigError(faults)
    faults = [
        fault(name, config[name], f"the model here has {' or '.join(map(repr, allowed))} only")
        for name, allowed in never(family).items()
        if name in config and config[name] not in allowed and not _is_nf4(name, config[name])
    ]
    activation, activations = config[family.activation], {**ACTIVATIONS, **family.activations}
    if activation not in activations:
        faults.append(fault(family.activation, activation, f"of gates, these can be built: {', '.join(activations)}"))
    faults += [error for spelling in family.spellings for error in spelling.faults(config)]
    if faults:
        raise ConfigError(faults)
    heads = config["num_attention_heads"]
    keys: Keys = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_attention_heads": heads,
        "num_query_groups": config["num_key_value_heads"] or heads,
        "head_size": config["head_dim"] or config["hidden_size"] // heads,
        "ffn_hidden_size": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "max_positions": config["max_position_embeddings"],
        "normalization": "RMSNorm",
        "layernorm_epsilon": config["rms_norm_eps"],
        "activation": activations[activation],
        "position": "rope",
        "tie_embeddings": config["tie_word_embeddings"],
        "init_std": config["initializer_range"],
        **USUAL,
    }
    for spelling in family.spellings:
        keys |= spelling.read(config, keys)
    keys |= family.always
    if keys["num_experts"]:
        # As transformers: over a microbatch, if config.json asks for it. Its loss is that of all layers together, and
        # as large as the experts of a token where ours is 1 in each layer.
        weight, is_balanced = config.get("router_aux_loss_coef"), config.get("output_router_logits")
        keys["router_balancing"] = "aux_loss" if is_balanced and weight else "none"
        if keys["router_balancing"] != "none":
            layers = keys["num_layers"] - len(keys.get("dense_layers", ()))
            keys["router_aux_loss"] = weight * keys["experts_per_token"] / layers
    return keys


USUAL: Keys = {
    "zero_centered_norms": False,
    "norm_bias": True,
    "parallel_block": False,
    "pre_norms": True,
    "post_norms": False,
    "bias": False,
    "qkv_bias": False,
    "proj_bias": False,
    "qk_norm": False,
    "qk_norm_over_heads": False,
    "attention_scale_size": 0.0,
    "attention_softcap": 0.0,
    "logit_softcap": 0.0,
    "scale_embeddings": False,
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logit_divisor"), 1.0),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 0),
    "num_experts": 0,
    "shared_expert_ffn_hidden_size": 0,
    "shared_expert_gate": False,
    "router_score_function": "softmax",
    "router_bias": False,
    "router_groups": 0,
    "router_groups_per_token": 0,
    "router_scaling_factor": 1.0,
    "attention_output_gate": False,
    "attention_sinks": False,
    "activation_clamp": 0.0,
    "glu_offset": 0.0,
    "linear_attention_layers": [],
    "no_rope_layers": [],
    "rope_interleaved": False,
}
"""Keys of `LlmSpec` of a family that does not set them."""


def never(family: Family) -> dict[str, tuple]:
    """Return the supported values of keys that would change a model of the family."""
    supported = {name for spelling in family.spellings for name in spelling.supports}
    return {name: values for name, values in NEVER.items() if name not in supported} | dict(family.never)


def language_spec(config: Config) -> LlmSpec:
    """Return the model of `language_keys`."""
    keys = language_keys(config)
    return LlmSpec(**keys | {"rope_scaling": RopeScaling(**keys["rope_scaling"])})


def language_config_json(spec: LlmSpec, model_type: str, dtype: str = "float32") -> dict[str, Any]:
    """Return config.json of a language model, for versions 4 and 5 of `transformers`, without ids of special tokens.

    Args:
        spec: a model with `vocab_size` and `max_positions`.
        dtype: dtype of the weights, as named in `transformers`.

    Raises:
        ConfigError: there is no such family, or it has no such model; with the keys that it does not support.
    """
    family = family_of(model_type)
    unknown = [name for name in ("vocab_size", "max_positions") if not getattr(spec, name)]
    if unknown:
        raise ConfigError([Fault(f"modules.{LANGUAGE}.llm.{name}", "is 0: a config.json needs it") for name in unknown])
    if not family.architecture:
        raise ConfigError([fault("model_type", model_type, "it is a part, and is written with the whole model only")])
    activations = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    config = {
        "architectures": [family.architecture],
        "model_type": model_type,
        "dtype": dtype,
        "torch_dtype": dtype,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.key_heads,
        "head_dim": spec.head_width,
        family.activation: activations.get(spec.activation, spec.activation),
        "max_position_embeddings": spec.max_positions,
        "initializer_range": spec.init_std,
        "rms_norm_eps": spec.layernorm_epsilon,
        "tie_word_embeddings": spec.tie_embeddings,
        "attention_dropout": 0.0,
        "use_cache": True,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    for spelling in family.spellings:
        config |= spelling.write(spec)
    _require_same(spec, config)
    return config


def model_types(spec: LlmSpec) -> list[str]:
    """Return the families that support such a model, in the order of `FAMILIES`."""
    spec = dataclasses.replace(spec, vocab_size=spec.vocab_size or 1, max_positions=spec.max_positions or 1)
    types = []
    for kind in FAMILIES:
        try:
            language_config_json(spec, kind)
        except ConfigError:
            continue
        types.append(kind)
    return types


def _with_defaults(family: Family, config: Config) -> dict[str, Any]:
    """Return the config with the defaults of its class, in one spelling."""
    defaults = dict(_DEFAULTS)
    with suppress(EncoderError):  # a family of a user may have no class
        defaults |= class_defaults(family.config_type or family.type)
    plain = {name: value for name, value in config.items() if name not in family.ignored}
    for alias, name in family.aliases.items():
        for values in (defaults, plain):
            if alias in values:
                values.setdefault(name, values[alias])
    return {**defaults, **family.defaults, **plain}


def _require_same(spec: LlmSpec, config: Config) -> None:
    """Raise ConfigError if the config reads back as another model."""
    ours, read = _meaning(spec), _meaning(language_spec(config))
    wrong = [
        Fault(
            f"modules.{LANGUAGE}.llm.{name}",
            f"is {ours[name]!r}, for which a model of family {config['model_type']} has no place in its config.json: "
            f"it would have {read[name]!r}",
        )
        for name in ours
        if ours[name] != read[name]
    ]
    if wrong:
        raise ConfigError(wrong)


def _meaning(spec: LlmSpec) -> dict[str, Any]:
    """Return what a model computes, by key: equal for two specs that spell one model differently."""
    chosen = ("name", "dropout", "router_balancing", "router_aux_loss", "router_z_loss")
    plain = {name: value for name, value in dataclasses.asdict(spec).items() if name not in chosen}
    layers, windows = range(spec.num_layers), spec.window and [spec.window_of(n) for n in range(spec.num_layers)]
    unscaled = spec.rope_base if spec.rope_scaling.kind == "default" else 0.0
    if not spec.num_experts:
        of_experts = ("expert", "shared_expert", "router_")
        plain |= {name: None for name in plain if name.startswith(of_experts)}
    else:
        plain |= {
            "expert_ffn_hidden_size": spec.expert_width,
            "router_renormalise": not spec.softmax_over_all_experts,
        }
        if not any(not spec.has_experts(layer) for layer in layers):
            plain["ffn_hidden_size"] = None  # no layer uses it
    if not spec.linear_attention_layers:
        plain |= dict.fromkeys(name for name in plain if name.startswith("linear_"))
    return plain | {
        "num_query_groups": spec.key_heads,
        "head_size": spec.head_width,
        "attention_scale_size": spec.attention_scale_size or float(spec.head_width),
        "qkv_bias": spec.bias or spec.qkv_bias,
        "proj_bias": spec.bias or spec.proj_bias,
        "window": windows,
        "local_rope_base": 0.0 if spec.local_rope_base == unscaled else spec.local_rope_base,
        "full_attention_layers": None,
        "dense_layers": sorted(spec.dense_layers),
        "linear_attention_layers": sorted(spec.linear_attention_layers),
        "no_rope_layers": sorted(spec.no_rope_layers),
    }
