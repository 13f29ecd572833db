"""How rotary position embeddings are stretched to longer sequences, and the checks of it. Imports no torch."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from mimo_train.config.fault import Fault
from mimo_train.config.keys import Section, key, shown, value_faults

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
"""Kinds of scaling that read a key."""


@dataclass
class RopeScaling(Section):
    """How the frequencies of rotary position embeddings are changed for sequences that are longer than those of the
    first training."""

    kind: str = key("default", choices=("default", "linear", "llama3", "yarn", "dynamic"))
    """`default` (unchanged), `linear`, `llama3`, `yarn` (Peng et al. 2023, arXiv 2309.00071), or `dynamic`: unchanged
    up to `max_positions`, and refused beyond it, where the frequencies would depend on the batch."""
    factor: float = key(1.0, above=0)
    """How many times longer sequences are."""
    original_positions: int = key(0, at_least=0)
    """Positions of the first training; `llama3` and `yarn` need it."""
    low_frequency_factor: float = key(1.0, above=0)
    """`llama3`: waves longer than `original_positions` divided by this are stretched by the whole factor."""
    high_frequency_factor: float = key(4.0, above=0)
    """`llama3`: waves shorter than `original_positions` divided by this are not stretched. Above
    `low_frequency_factor`."""
    beta_fast: float = key(32.0, above=0)
    """`yarn`: waves with more turns than this in `original_positions` are not stretched."""
    beta_slow: float = key(1.0, above=0)
    """`yarn`: waves with fewer turns than this are stretched by the whole factor. At most `beta_fast`."""
    attention_factor: float = key(0.0, at_least=0, zero_means="from factor, mscale and mscale_all_dim")
    """`yarn`: what rotated queries and keys are multiplied by; 0: from `factor`, `mscale` and `mscale_all_dim`."""
    mscale: float = key(0.0, at_least=0)
    """`yarn`: with `mscale_all_dim`, makes the attention factor; 0: not used."""
    mscale_all_dim: float = key(0.0, at_least=0)
    """`yarn`: with `mscale`, makes the attention factor; 0: not used."""
    truncate: bool = True
    """`yarn`: whether the ends of the range between the two betas are rounded to whole frequencies."""

    def faults(self, prefix: str, max_positions: int) -> Iterator[Fault]:
        """Values that cannot be.

        Args:
            prefix: config key of this section.
            max_positions: of the model; 0: not known.
        """
        found = list(value_faults(self, prefix))
        yield from found
        if found:
            return
        for field in dataclasses.fields(self):
            value, kinds = getattr(self, field.name), USED_BY.get(field.name)
            if kinds and self.kind not in kinds and value != field.default:
                yield Fault(
                    f"{prefix}.{field.name}",
                    f"is {shown(value)}, which {prefix}.kind {self.kind!r} does not use ({' and '.join(kinds)} do): "
                    "remove it, or change the kind",
                )
        if self.kind in USED_BY["original_positions"] and not self.original_positions:
            yield Fault(f"{prefix}.original_positions", f"{self.kind} needs the positions of the first training")
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
