"""Rotary embeddings in config.json: `rope_parameters` of transformers 5, `rope_theta` and `rope_scaling` of 4."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mimo_train.config.errors import ConfigError, Fault
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.models.blocks.rotary import USED_BY, RopeScaling

_NAMES = {
    "factor": "factor",
    "original_positions": "original_max_position_embeddings",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
}
"""Names in config.json, by our names."""

_AXES = ("mrope_section", "mrope_interleaved")
"""Keys of positions on three axes."""

_LOCAL_THETA = 10000.0
"""Default base period of sliding-window layers, if they have their own."""


def read_rope(
    config: Mapping[str, Any], *, theta: float, two_bases: bool, windows: bool, axes: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """Return the rotary keys of `LlmSpec`.

    Args:
        theta: default base period.
        two_bases: True if sliding-window layers have their own frequencies.
        windows: True if there are such layers.
        axes: default `mrope_section` if tokens have positions on three axes; empty: no default.

    Raises:
        ConfigError: an unsupported kind, or two values for one setting.
    """
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    local: Mapping[str, Any] = {}
    if two_bases:
        new, local = new.get("full_attention") or {}, new.get("sliding_attention") or {}
        new = {**new, **old}
        base = _base_period(local, "rope_theta", config, "rope_local_base_freq", _LOCAL_THETA)
        if windows and _kind(local) != "default":
            raise _refused("rope_parameters", local, "layers with a window have rotary positions without scaling")
    else:
        # Version 5 reads the old key if both are there.
        new, base = old or new, 0.0
    if any(isinstance(value, Mapping) for value in new.values()):
        raise _refused("rope_parameters", new, "this family has the same rotary positions in all layers")
    on_axes: dict[str, Any] = {"mrope_section": [], "mrope_interleaved": False}
    if axes is not None:
        new, on_axes = _without_axes({"mrope_section": list(axes), **new})
    return {
        "rope_base": float(_base_period(new, "rope_theta", config, "rope_theta", theta)),
        "rope_scaling": _scaling(new, config),
        "local_rope_base": float(base) if windows else 0.0,
        **on_axes,
    }


def written_rope(spec: LlmSpec, *, two_bases: bool, kinds: tuple[str, str]) -> dict[str, Any]:
    """Return the keys of config.json for both versions; `kinds`: names of full and of sliding-window attention."""
    scaling: dict[str, Any] = {}
    if spec.rope_scaling.kind != "default":
        scaling["rope_type"] = spec.rope_scaling.kind
        for name, theirs in _NAMES.items():
            value = getattr(spec.rope_scaling, name)
            optional = name in ("attention_factor", "mscale", "mscale_all_dim") and not value
            if spec.rope_scaling.kind in USED_BY[name] and not optional:
                scaling[theirs] = value
    rope = {"rope_type": "default", **scaling, "rope_theta": spec.rope_base}
    keys = {"rope_theta": spec.rope_base, "rope_scaling": scaling or None, "rope_parameters": rope}
    if two_bases:
        local = spec.local_rope_base or (_LOCAL_THETA if scaling else spec.rope_base)
        keys["rope_local_base_freq"] = local
        keys["rope_parameters"] = {kinds[0]: rope, kinds[1]: {"rope_type": "default", "rope_theta": local}}
    return keys


def _without_axes(parameters: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the keys of config.json into those without the three axes, and the keys of `LlmSpec` for the axes."""
    if not parameters.get("mrope_section"):
        raise _refused("mrope_section", parameters.get("mrope_section"), "this family has positions on three axes")
    on_axes = {
        "mrope_section": list(parameters["mrope_section"]),
        "mrope_interleaved": bool(parameters.get("mrope_interleaved")),
    }
    rest = {name: value for name, value in parameters.items() if name not in _AXES}
    # Version 4's name for unscaled frequencies.
    return {name: "default" if value == "mrope" else value for name, value in rest.items()}, on_axes


def _scaling(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    kind, positions = _kind(parameters), config["max_position_embeddings"]
    kinds = next(field.metadata for field in dataclasses.fields(RopeScaling) if field.name == "kind")["rules"].choices
    if kind not in kinds:
        raise _refused("rope_type", kind, f"these can be built: {', '.join(kinds)}")
    supported = {"type", "rope_type", "rope_theta", "partial_rotary_factor", *_NAMES.values()}
    unknown = sorted(name for name in parameters if name not in supported and parameters[name] is not None)
    if unknown:
        raise _refused(unknown[0], parameters[unknown[0]], f"rotary positions of kind {kind} do not use it")
    if parameters.get("partial_rotary_factor") not in (None, 1):
        raise _refused("partial_rotary_factor", parameters["partial_rotary_factor"], "whole heads are turned here")
    keys: dict[str, Any] = {"kind": kind}
    for name, theirs in _NAMES.items():
        if kind in USED_BY[name] and parameters.get(theirs) is not None:
            keys[name] = parameters[theirs]
    if kind in USED_BY["original_positions"]:
        # The outer key has priority.
        outer = config.get("original_max_position_embeddings")
        keys["original_positions"] = outer or keys.get("original_positions") or positions
    if kind == "yarn" and "factor" not in keys:
        keys["factor"] = positions / keys["original_positions"]
    for name in ("beta_fast", "beta_slow"):
        if keys.get(name) == 0:
            del keys[name]  # counts as absent
    missing = [theirs for name, theirs in _NAMES.items() if _needed(name, kind) and name not in keys]
    if missing:
        raise _refused("rope_type", kind, f"it needs {missing[0]}, which is not there")
    return dataclasses.asdict(RopeScaling(**keys))


def _needed(name: str, kind: str) -> bool:
    return kind in USED_BY[name] and name in ("factor", "low_frequency_factor", "high_frequency_factor")


def _kind(parameters: Mapping[str, Any]) -> str:
    return parameters.get("rope_type") or parameters.get("type") or "default"


def _base_period(inner: Mapping[str, Any], name: str, config: Mapping[str, Any], outer: str, default: float) -> float:
    """Return a base period, which version 5 stores inside and version 4 outside. Raises ConfigError for two values,
    which the versions would read as two models."""
    values = {where: value for where, value in ((name, inner.get(name)), (outer, config.get(outer))) if value}
    if inner.get(name) and config.get(outer) and inner[name] != config[outer]:
        raise ConfigError(
            [
                Fault(
                    "config.json",
                    f"{outer} is {config[outer]!r}, and {name} of rope_parameters {inner[name]!r}: make them equal",
                )
            ]
        )
    return next(iter(values.values()), default)


def _refused(key: str, value: Any, reason: str) -> ConfigError:
    return ConfigError([Fault("config.json", f"{key} is {value!r}: {reason}")])
