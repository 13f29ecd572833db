"""Rotary positions: how frequencies are scaled, and the keys that say so."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from mimo_train.config.errors import Fault
from mimo_train.config.keys import Section, changed_fields, key, shown, value_faults
from mimo_train.models.blocks.base import LayerKeys

USED_BY = {
    "factor": ("linear", "llama3", "yarn", "dynamic"),
    "original_positions": ("llama3", "yarn"),
    "low_frequency_factor": ("llama3",),
    "high_frequency_factor": ("llama3",),
    "beta_fast": ("yarn",),
    "beta_slow": ("yarn",),
    "attention_factor": ("yarn",),
    "mscale": ("yarn",),
    "mscale_all_dim": ("yarn",),
    "truncate": ("yarn",),
}
"""Kinds of scaling that read each key."""


@dataclass
class RopeScaling(Section):
    """Scaling of rotary position embeddings for sequences longer than those of the first training."""

    kind: str = key("default", choices=("default", "linear", "llama3", "yarn", "dynamic"))
    """As `rope_type` of `transformers`: `default`, `linear`, `llama3`, `yarn`, or `dynamic` (an error beyond
    `max_positions`)."""
    factor: float = key(1.0, above=0)
    """Factor by which sequences are longer."""
    original_positions: int = key(0, at_least=0)
    """Positions of the original training; required by `llama3` and `yarn`."""
    low_frequency_factor: float = key(1.0, above=0)
    """`llama3`: waves longer than `original_positions` / this are stretched by `factor`."""
    high_frequency_factor: float = key(4.0, above=0)
    """`llama3`: waves shorter than `original_positions` / this are kept."""
    beta_fast: float = key(32.0, above=0)
    """`yarn`: waves with more turns in `original_positions` are kept."""
    beta_slow: float = key(1.0, above=0)
    """`yarn`: waves with fewer turns are stretched by `factor`."""
    attention_factor: float = key(0.0, at_least=0, zero_means="from factor, mscale and mscale_all_dim")
    """`yarn`: factor of rotated queries and keys; 0: from `factor`, `mscale` and `mscale_all_dim`."""
    mscale: float = key(0.0, at_least=0)
    """`yarn`: gives the attention factor with `mscale_all_dim`."""
    mscale_all_dim: float = key(0.0, at_least=0)
    """`yarn`: see `mscale`."""
    truncate: bool = True
    """`yarn`: round the range between the betas to whole frequencies."""

    def faults(self, prefix: str, max_positions: int) -> Iterator[Fault]:
        """Yield invalid values; `prefix`: config key of this section; `max_positions`: of the model, 0: unknown."""
        faults = list(value_faults(self, prefix))
        yield from faults
        if faults:
            return
        for name in changed_fields(self):
            value, kinds = getattr(self, name), USED_BY.get(name)
            if kinds and self.kind not in kinds:
                yield Fault(
                    f"{prefix}.{name}",
                    f"is {shown(value)}, which {prefix}.kind {self.kind!r} does not use ({' and '.join(kinds)} do): "
                    "remove it, or change the kind",
                )
        if self.kind in USED_BY["original_positions"] and not self.original_positions:
            yield Fault(
                f"{prefix}.original_positions",
                f"is required by {prefix}.kind {self.kind}. Set the sequence length of the first training",
            )
        if self.kind == "llama3" and self.high_frequency_factor <= self.low_frequency_factor:
            yield Fault(
                f"{prefix}.high_frequency_factor",
                f"must be above low_frequency_factor {self.low_frequency_factor:g}, is {self.high_frequency_factor:g}",
            )
        if self.kind == "yarn" and self.beta_fast < self.beta_slow:
            yield Fault(f"{prefix}.beta_fast", f"must be at least beta_slow {self.beta_slow:g}, is {self.beta_fast:g}")
        if self.kind == "dynamic" and not max_positions:
            yield Fault(
                f"{prefix.rpartition('.')[0]}.max_positions",
                f"{prefix}.kind dynamic changes nothing up to this length, which must be known: set it",
            )


@dataclass
class RotaryKeys(LayerKeys):
    """Keys of positions."""

    position: str = key("rope", choices=("rope", "learned"))
    """`rope` (rotary) or `learned` (absolute). `learned` ties a checkpoint to its `data.sequence_length`."""
    max_positions: int = key(0, at_least=0, zero_means="not known")
    """Longest sequence of the model; 0: unknown. A bound only with `rope_scaling.kind: dynamic`."""
    rope_base: float = key(10000.0, at_least=1)
    """Base period of rotary positions."""
    partial_rotary_factor: float = key(1.0, above=0, at_most=1)
    """Share of a head's channels that rotate, the first ones."""
    rope_interleaved: bool = False
    """A channel rotates with its neighbour, not with one half a head away."""
    no_rope_layers: list[int] = key(factory=list, at_least=0)
    """Layers, counted from 0, without rotary positions."""
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    """How frequencies are changed for longer sequences."""
    mrope_section: list[int] = key(factory=list, at_least=0)
    """Numbers of frequencies that turn by time, row and column (M-RoPE, arXiv 2409.12191). Empty: all by position."""
    mrope_interleaved: bool = False
    """With `mrope_section`: axes alternate by frequency, as in Qwen3-VL."""
    local_rope_base: float = key(0.0, at_least=0, zero_means="as in the other layers")
    """Base period in layers with a `window`, without scaling; 0: as in the other layers."""

    def rotary_faults(self, prefix: str, width: int) -> Iterator[Fault]:
        """Yield invalid combinations of keys; `prefix`: key of the spec; `width`: channels of a head that are
        rotated."""
        if self.position != "rope":
            if self.rope_base != RotaryKeys.rope_base:
                yield Fault(
                    f"{prefix}.rope_base", f"requires rotary positions, but {prefix}.position is {self.position}"
                )
            needs_rope = {
                "rope_scaling.kind": self.rope_scaling.kind != "default",
                "local_rope_base": self.local_rope_base,
                "no_rope_layers": self.no_rope_layers,
                "rope_interleaved": self.rope_interleaved,
                "partial_rotary_factor": self.partial_rotary_factor != 1,
            }
            for name in (name for name, is_set in needs_rope.items() if is_set):
                yield Fault(f"{prefix}.{name}", f"requires rotary positions, but {prefix}.position is {self.position}")
        if self.rope_interleaved and self.local_rope_base:
            yield Fault(
                f"{prefix}.rope_interleaved", f"is not supported with {prefix}.local_rope_base. Set one of them"
            )
        section = self.mrope_section
        if not section:
            if self.mrope_interleaved:
                yield Fault(f"{prefix}.mrope_interleaved", f"requires {prefix}.mrope_section, which is empty")
            return
        if len(section) != 3 or min(section) < 0 or 2 * sum(section) != width:
            yield Fault(
                f"{prefix}.mrope_section",
                f"must be 3 numbers of at least 0 that make {width // 2} together, half of the {width} "
                f"channels of a head that rotate, is {section}",
            )
        elif self.position != "rope":
            yield Fault(
                f"{prefix}.mrope_section", f"requires rotary positions, but {prefix}.position is {self.position}"
            )
        elif self.local_rope_base:
            yield Fault(
                f"{prefix}.mrope_section",
                f"rotates all layers alike, but {prefix}.local_rope_base is {self.local_rope_base:g}. Set one of them",
            )
