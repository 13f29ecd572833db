"""config.json of a language model <-> `LlmSpec`, for the supported families.

A missing key has the default of its class in transformers 5.23. Spellings of versions 4 and 5 are both read and
written. Unsupported values are rejected with the name of the key.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from mimo_train.config.errors import ConfigError, Fault
from mimo_train.config.llm_spec import LlmSpec, RopeScaling
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.pretrained.language_families import FAMILIES, Family
from mimo_train.config.pretrained.rope import read_rope, written_rope

Config = Mapping[str, Any]

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers in `layer_types`."""

_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu"}
"""Our activation, by the name of the gate's function."""

_NEVER = {
    "quantization_config": (None,),
    "use_bidirectional_attention": (None, False),
    "attention_dropout": (None, 0),
    "router_jitter_noise": (None, 0),
    "partial_rotary_factor": (None, 1),
}
"""Supported values of keys that would change the model."""

_NUMBERS = {
    int: (
        *("hidden_size", "intermediate_size", "vocab_size", "head_dim", "max_position_embeddings"),
        *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    ),
    float: ("rms_norm_eps", "initializer_range"),
}
"""Keys by the type of their values."""
_MAY_BE_NULL = ("head_dim", "num_key_value_heads")


def language_keys(config: Config) -> dict[str, Any]:
    """Return the keys of `LlmSpec` from the config.json of a language model, or from its part of a composite's.

    Raises:
        ConfigError: an unsupported family, key or value, by its name in config.json.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ConfigError([_fault("model_type", kind, f"of language models, these can be read: {', '.join(FAMILIES)}")])
    family = FAMILIES[kind]
    config = _one_spelling(family, config)
    faults = [
        _fault(name, config[name], f"a {'whole number' if kind is int else 'number'} is needed")
        for kind, names in _NUMBERS.items()
        for name in names
        if type(config[name]) not in (int, kind) and not (config[name] is None and name in _MAY_BE_NULL)
    ]
    if faults:
        raise ConfigError(faults)
    faults = [
        _fault(name, config[name], f"the model here has {' or '.join(map(repr, allowed))} only")
        for name, allowed in _NEVER.items()
        if name in config and config[name] not in allowed
    ]
    activation = config["hidden_act"]
    if activation not in _ACTIVATIONS:
        faults.append(_fault("hidden_act", activation, f"of gates, these can be built: {', '.join(_ACTIVATIONS)}"))
    faults += _layer_type_faults(family, config)
    if faults:
        raise ConfigError(faults)
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    biases = {name: bool(config.get(name)) for name in family.biases}
    if biases.get("mlp_bias") and not biases["attention_bias"]:
        raise ConfigError([_fault("mlp_bias", True, "the model here has it with attention_bias only")])
    windowed = _windowed_layers(family, config)
    keys = {
        "num_layers": layers,
        "hidden_size": config["hidden_size"],
        "num_attention_heads": heads,
        "num_query_groups": config["num_key_value_heads"] or heads,
        "head_size": config["head_dim"] or config["hidden_size"] // heads,
        "ffn_hidden_size": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "max_positions": config["max_position_embeddings"],
        "normalization": "RMSNorm",
        "layernorm_epsilon": config["rms_norm_eps"],
        "zero_centered_norms": False,
        "post_norms": False,
        "activation": _ACTIVATIONS[activation],
        "bias": biases.get("mlp_bias", False),
        "qkv_bias": biases.get("attention_bias", False) and not biases.get("mlp_bias"),
        "proj_bias": biases.get("attention_bias", False) and not biases.get("mlp_bias"),
        "position": "rope",
        "window": config["sliding_window"] if windowed else 0,
        "full_attention_layers": [layer for layer in range(layers) if layer not in windowed] if windowed else [],
        "qk_norm": False,
        "attention_scale_size": float(config["query_pre_attn_scalar"]) if family.gemma else 0.0,
        "attention_softcap": float(config.get("attn_logit_softcapping") or 0) if family.gemma else 0.0,
        "logit_softcap": float(config.get("final_logit_softcapping") or 0) if family.gemma else 0.0,
        "scale_embeddings": False,
        "tie_embeddings": config["tie_word_embeddings"],
        "init_std": config["initializer_range"],
        **read_rope(
            config, theta=family.theta, two_bases=kind == "gemma3_text", windows=bool(windowed), axes=family.mrope
        ),
        **_expert_keys(family, config),
        **family.always,
    }
    return keys


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
        ConfigError: the family has no such model; with the keys that it does not support.
    """
    if model_type not in FAMILIES:
        raise ConfigError([_fault("model_type", model_type, f"one of {', '.join(FAMILIES)} can be written")])
    unknown = [name for name in ("vocab_size", "max_positions") if not getattr(spec, name)]
    if unknown:
        raise ConfigError([Fault(f"modules.{LANGUAGE}.llm.{name}", "is 0: a config.json needs it") for name in unknown])
    family = FAMILIES[model_type]
    if not family.architecture:
        raise ConfigError([_fault("model_type", model_type, "it is a part, and is written with the whole model only")])
    activations = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
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
        ("hidden_activation" if family.gemma else "hidden_act"): activations.get(spec.activation, spec.activation),
        "max_position_embeddings": spec.max_positions,
        "initializer_range": spec.init_std,
        "rms_norm_eps": spec.layernorm_epsilon,
        "tie_word_embeddings": spec.tie_embeddings,
        "attention_dropout": 0.0,
        "use_cache": True,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **({"attention_bias": spec.bias or spec.qkv_bias} if "attention_bias" in family.biases else {}),
        **({"mlp_bias": spec.bias} if "mlp_bias" in family.biases else {}),
        **_written_windows(family, spec),
        **written_rope(spec, two_bases=model_type == "gemma3_text", kinds=(FULL, SLIDING)),
        **(_written_experts(model_type, spec) if family.experts else {}),
    }
    if family.gemma:
        config |= {
            "query_pre_attn_scalar": _integer_if_possible(spec.attention_scale_size or spec.head_width),
            "attn_logit_softcapping": spec.attention_softcap or None,
            "final_logit_softcapping": spec.logit_softcap or None,
            "use_bidirectional_attention": False,
        }
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


def _one_spelling(family: Family, config: Config) -> dict[str, Any]:
    """Return the config with the defaults of its class, in the spelling of version 5."""
    plain = dict(config)
    if plain["model_type"] == "gemma2":
        plain.pop("sliding_window_pattern", None)  # its class has no such key
    if family.experts and "num_experts" in plain:
        plain.setdefault("num_local_experts", plain["num_experts"])
    if family.gemma:
        plain["hidden_act"] = plain.get("hidden_activation", family.defaults["hidden_act"])
    return {**family.defaults, **plain}


def _layer_type_faults(family: Family, config: Config) -> Iterator[Fault]:
    kinds, layers = config.get("layer_types"), config["num_hidden_layers"]
    if kinds is None:
        return
    if len(kinds) != layers or set(kinds) - {FULL, SLIDING}:
        yield _fault("layer_types", kinds, f"one of {FULL} and {SLIDING} for each of {layers} layers can be built")
    elif SLIDING in kinds and not config.get("sliding_window"):
        yield _fault("sliding_window", config.get("sliding_window"), f"layer_types has {SLIDING} layers")
    elif SLIDING in kinds and family.windows == "layers" and not config["use_sliding_window"]:
        yield _fault("use_sliding_window", config["use_sliding_window"], f"layer_types has {SLIDING} layers")
    elif family.windows in ("none", "all", "switched"):
        wanted = SLIDING if _windowed_layers(family, config) else FULL
        if set(kinds) != {wanted}:
            yield _fault("layer_types", kinds, f"this family does not read it, and has {wanted} in all layers")


def _windowed_layers(family: Family, config: Config) -> set[int]:
    every, kinds = set(range(config["num_hidden_layers"])), config.get("layer_types")
    switched = family.windows in ("switched", "layers") and not config["use_sliding_window"]
    if family.windows == "none" or switched or not config["sliding_window"]:
        return set()
    if family.windows in ("all", "switched"):
        return every
    if kinds is not None:
        return {layer for layer in every if kinds[layer] == SLIDING}
    if family.windows == "layers":
        return {layer for layer in every if layer >= config["max_window_layers"]}
    return {layer for layer in every if (layer + 1) % config["sliding_window_pattern"]}


def _expert_keys(family: Family, config: Config) -> dict[str, Any]:
    if not family.experts:
        return {"num_experts": 0}
    keys = {"num_experts": config[family.experts], "experts_per_token": config["num_experts_per_tok"]}
    if "norm_topk_prob" not in family.defaults:
        keys |= {"router_renormalise": True, "expert_ffn_hidden_size": 0, "dense_layers": []}
    else:
        dense, step = set(config["mlp_only_layers"] or ()), config["decoder_sparse_step"]
        keys |= {
            "router_renormalise": config["norm_topk_prob"],
            "expert_ffn_hidden_size": config["moe_intermediate_size"],
            "dense_layers": [n for n in range(config["num_hidden_layers"]) if n in dense or (n + 1) % step],
        }
    if keys["router_renormalise"] and keys["experts_per_token"] == 1:
        key = "norm_topk_prob" if "norm_topk_prob" in family.defaults else "num_experts_per_tok"
        raise ConfigError([_fault(key, config[key], "the weight of a single expert would always be 1")])
    return keys


def _written_windows(family: Family, spec: LlmSpec) -> dict[str, Any]:
    kinds = [SLIDING if spec.window_of(layer) else FULL for layer in range(spec.num_layers)]
    if family.windows == "none":
        return {}
    keys: dict[str, Any] = {"sliding_window": spec.window or None}
    if family.windows in ("switched", "layers"):
        keys["use_sliding_window"] = bool(spec.window)
    if family.windows == "layers":
        # Version 4 before 4.53 only knows this key: the layers from here on.
        keys["max_window_layers"] = kinds.index(SLIDING) if SLIDING in kinds else spec.num_layers
    if family.windows in ("layers", "alternate"):
        keys["layer_types"] = kinds
    return keys


def _written_experts(model_type: str, spec: LlmSpec) -> dict[str, Any]:
    keys = {
        "num_local_experts": spec.num_experts,
        "num_experts_per_tok": spec.experts_per_token,
        "output_router_logits": False,
    }
    if model_type == "mixtral":
        return keys | {"intermediate_size": spec.expert_width, "router_jitter_noise": 0.0}
    return keys | {
        "num_experts": spec.num_experts,
        "moe_intermediate_size": spec.expert_width,
        "norm_topk_prob": not spec.softmax_over_all_experts,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(spec.dense_layers),
    }


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
    of_experts = ("experts_per_token", "router_renormalise", "expert_ffn_hidden_size", "shared_expert_gate")
    if not spec.num_experts:
        plain |= dict.fromkeys(of_experts)
    else:
        plain |= {
            "expert_ffn_hidden_size": spec.expert_width,
            "router_renormalise": not spec.softmax_over_all_experts,
        }
        if not any(not spec.has_experts(layer) for layer in layers):
            plain["ffn_hidden_size"] = None  # no layer uses it
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
    }


def _integer_if_possible(number: float) -> float | int:
    """Return an integer if possible, as `transformers` expects it."""
    return int(number) if number == int(number) else number


def _fault(key: str, value: Any, reason: str) -> Fault:
    return Fault("config.json", f"{key} is {value!r}: {reason}")
