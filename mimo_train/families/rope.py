"""Rotary positions in config.json: `rope_parameters` of transformers 5, `rope_theta` and `rope_scaling` of 4."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mimo_train.config.errors import ConfigError, Fault
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.families.base import Config, Keys, Spelling, rejected
from mimo_train.families.windows import FULL, SLIDING
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

_PARTIAL = "partial_rotary_factor"
_AXES = ("mrope_section", "mrope_interleaved", "interleaved")
"""Keys of positions on three axes. No class reads the last one, which directories of Qwen3-Omni have."""


@dataclass(frozen=True)
class Rope(Spelling):
    """Rotary positions of all layers alike."""

    theta: float = 10000.0
    """Default base period."""
    axes: tuple[int, ...] | None = None
    """Default of `mrope_section` if tokens have positions on three axes; empty: no default."""

    partial: float | None = None
    """Default of `partial_rotary_factor` if the family reads it."""

    @property
    def supports(self) -> tuple[str, ...]:
        return () if self.partial is None else (_PARTIAL,)

    def read(self, config: Config, keys: Keys) -> Keys:
        """See `Spelling`. Raises ConfigError for an unsupported kind, or two values for one setting."""
        # Version 5 reads the old key if both are there.
        parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if any(isinstance(value, Mapping) for value in parameters.values()):
            raise rejected("rope_parameters", parameters, "this family has the same rotary positions in all layers")
        on_axes: Keys = {"mrope_section": [], "mrope_interleaved": False}
        if self.axes is not None:
            parameters, on_axes = _without_axes({"mrope_section": list(self.axes), **parameters})
        partial = 1.0
        if self.partial is not None:
            partial = float(_one_value(parameters, _PARTIAL, config, _PARTIAL, self.partial))
            parameters = {name: value for name, value in parameters.items() if name != _PARTIAL}
        return {
            "rope_base": float(_one_value(parameters, "rope_theta", config, "rope_theta", self.theta)),
            "rope_scaling": _scaling(parameters, config),
            "local_rope_base": 0.0,
            _PARTIAL: partial,
            **on_axes,
        }

    def write(self, spec: LlmSpec) -> Keys:
        scaling = _written_scaling(spec.rope_scaling)
        partial = dict.fromkeys(self.supports, spec.partial_rotary_factor)
        rope = {"rope_type": "default", **scaling, "rope_theta": spec.rope_base, **partial}
        if self.axes is not None:
            rope |= {"mrope_section": list(spec.mrope_section), "mrope_interleaved": spec.mrope_interleaved}
        return {"rope_theta": spec.rope_base, "rope_scaling": scaling or None, "rope_parameters": rope, **partial}


@dataclass(frozen=True)
class TwoRopes(Rope):
    """Rotary positions of layers that attend to all tokens, and others of layers with a window."""

    local_theta: float = 10000.0
    """Default base period of layers with a window."""
    local_key: str = "rope_local_base_freq"
    """Key of version 4 for it; empty: the class has none, and ignores others'."""

    def read(self, config: Config, keys: Keys) -> Keys:
        of_layers, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
        local = of_layers.get(SLIDING) or {}
        base = _one_value(local, "rope_theta", config, self.local_key, self.local_theta)
        if keys["window"] and _kind(local) != "default":
            raise rejected("rope_parameters", local, "layers with a window have rotary positions without scaling")
        everywhere = {**config, "rope_parameters": {**(of_layers.get(FULL) or {}), **old}, "rope_scaling": None}
        return super().read(everywhere, keys) | {"local_rope_base": float(base) if keys["window"] else 0.0}

    def write(self, spec: LlmSpec) -> Keys:
        keys = super().write(spec)
        base = spec.local_rope_base or (self.local_theta if keys["rope_scaling"] else spec.rope_base)
        local = {"rope_type": "default", "rope_theta": base}
        both = {FULL: keys["rope_parameters"], SLIDING: local}
        return keys | {"rope_parameters": both} | ({self.local_key: base} if self.local_key else {})


def _written_scaling(scaling: RopeScaling) -> Keys:
    if scaling.kind == "default":
        return {}
    keys = {"rope_type": scaling.kind}
    for name, theirs in _NAMES.items():
        value = getattr(scaling, name)
        optional = name in ("attention_factor", "mscale", "mscale_all_dim") and not value
        if scaling.kind in USED_BY[name] and not optional:
            keys[theirs] = value
    return keys


def _without_axes(parameters: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the keys of config.json into those without the three axes, and the keys of `LlmSpec` for the axes."""
    if not parameters.get("mrope_section"):
        raise rejected("mrope_section", parameters.get("mrope_section"), "this family has positions on three axes")
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
        raise rejected("rope_type", kind, f"these can be built: {', '.join(kinds)}")
    supported = {"type", "rope_type", "rope_theta", _PARTIAL, *_NAMES.values()}
    unknown = sorted(name for name in parameters if name not in supported and parameters[name] is not None)
    if unknown:
        raise rejected(unknown[0], parameters[unknown[0]], f"rotary positions of kind {kind} do not use it")
    if parameters.get(_PARTIAL) not in (None, 1):
        raise rejected(_PARTIAL, parameters[_PARTIAL], "whole heads are turned here")
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
        raise rejected("rope_type", kind, f"it needs {missing[0]}, which is not there")
    return dataclasses.asdict(RopeScaling(**keys))


def _needed(name: str, kind: str) -> bool:
    return kind in USED_BY[name] and name in ("factor", "low_frequency_factor", "high_frequency_factor")


def _kind(parameters: Mapping[str, Any]) -> str:
    return parameters.get("rope_type") or parameters.get("type") or "default"


def _one_value(inner: Mapping[str, Any], name: str, config: Mapping[str, Any], outer: str, default: float) -> float:
    """Return a value that version 5 stores inside and version 4 outside. Raises ConfigError for two values, which the
    versions would read as two models."""
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
