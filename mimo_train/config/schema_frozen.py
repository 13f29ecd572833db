"""Config of what goes with frozen weights: adapters beside them, and features kept on disk. Imports no torch."""

from dataclasses import dataclass, field
from typing import Any

ADAPTED = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Linear layers of a transformer layer that can have adapters."""

ADAPTERS = ("lora_a", "lora_b")
"""Names of an adapter's parameters, beside the `weight` of its linear layer."""


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return name.rpartition(".")[2] in ADAPTERS


@dataclass
class LoraConfig:
    """Low-rank adapters beside frozen linear layers (Hu et al. 2021, arXiv 2106.09685)."""

    rank: int = 0
    """Rank of the adapters; 0: none. Above 0 the module's other weights are frozen, except an encoder's projector."""
    alpha: float = 16.0
    """The adapters' output is multiplied by alpha / rank."""
    dropout: float = 0.0
    """Dropout probability of the adapters' input."""
    targets: list[str] = field(default_factory=lambda: list(ADAPTED))
    """Linear layers that have adapters: linear_qkv, linear_proj, linear_fc1, linear_fc2."""

    def num_parameters(self, spec: Any, tp: int = 1) -> int:
        """Parameters of the adapters of one layer on one rank: rank * (inputs + outputs) of every target.

        Tensor parallelism divides the outputs of column-parallel layers and the inputs of row-parallel ones.

        Args:
            spec: sizes of the encoder or the language model.
        """
        hidden, ffn = spec.hidden_size, spec.ffn_hidden_size
        heads = spec.num_attention_heads
        groups = getattr(spec, "num_query_groups", 0) or heads
        split = {
            "linear_qkv": hidden // heads * (heads + 2 * groups),
            "linear_proj": hidden,
            "linear_fc1": ffn * (2 if spec.activation == "swiglu" else 1),
            "linear_fc2": ffn,
        }
        return self.rank * sum(hidden + split[target] // tp for target in self.targets)


@dataclass
class FeatureCacheConfig:
    """Features of a frozen encoder, kept on disk from one epoch to the next."""

    dir: str = ""
    """Folder, which several runs may share; empty: no cache."""
    max_gigabytes: float = 10.0
    """Size of the folder, in 10^9 bytes, at which the features that were not used for longest go."""
