"""Sizes of a language model, and their checks. Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from mimo_train.config.fault import Fault
from mimo_train.config.keys import changed_fields, key, value_faults


@dataclass
class LlmSpec:
    """Sizes of a decoder-only language model built from Megatron-Core layers."""

    name: str = "gpt"
    """Free name, shown in tables."""
    num_layers: int = key(12, at_least=1)
    """Transformer layers over all pipeline stages."""
    hidden_size: int = key(768, at_least=1)
    """Width of the residual stream."""
    num_attention_heads: int = key(12, at_least=1)
    """Query heads. Must divide `hidden_size`; with `position: rope` heads have an even width."""
    num_query_groups: int = key(0, at_least=0, zero_means="as many as query heads")
    """Key and value heads (grouped-query attention); 0: as many as query heads. Must divide `num_attention_heads`."""
    ffn_hidden_size: int = key(3072, at_least=1)
    """Width of the feed-forward block, of each of its two halves with `swiglu`."""
    normalization: str = key("RMSNorm", choices=("RMSNorm", "LayerNorm"))
    """`RMSNorm` or `LayerNorm`."""
    layernorm_epsilon: float = key(1e-5, above=0)
    """Epsilon of every norm."""
    activation: str = key("swiglu", choices=("swiglu", "gelu", "silu"))
    """`swiglu`, `gelu` or `silu`."""
    bias: bool = False
    """Whether linear layers have biases. A model with experts has none."""
    position: str = key("rope", choices=("rope", "learned"))
    """`rope` (rotary) or `learned` (absolute). `learned` ties a checkpoint to its `data.sequence_length`."""
    rope_base: int = key(10000, above=0)
    """Base period of rotary position embeddings."""
    qk_norm: bool = False
    """Whether queries and keys are normalised per head."""
    tie_embeddings: bool = True
    """Whether the output layer shares the input embedding's weights."""
    dropout: float = key(0.0, at_least=0, below=1)
    """Dropout probability of hidden states and attention."""
    init_std: float = key(0.02, at_least=0)
    """Standard deviation of the initial weights."""
    num_experts: int = key(0, at_least=0)
    """Experts of every layer's feed-forward block (mixture of experts); 0: a dense model. See
    docs/layouts.md#experts."""
    experts_per_token: int = 2
    """Experts that the router picks for a token. From 1 to `num_experts`."""
    expert_ffn_hidden_size: int = key(0, at_least=0)
    """Width of one expert; 0: `ffn_hidden_size`."""
    shared_expert_ffn_hidden_size: int = key(0, at_least=0)
    """Width of the expert that every token passes; 0: none."""
    shared_expert_gate: bool = False
    """Whether a learned gate scales the shared expert's output."""
    router_balancing: str = key("seq_aux_loss", choices=("seq_aux_loss", "aux_loss", "global_aux_loss", "none"))
    """What the load-balancing loss balances: each sequence (`seq_aux_loss`; the same at every layout), the microbatch
    of each rank (`aux_loss`), all data-parallel ranks (`global_aux_loss`), or `none`."""
    router_aux_loss: float = key(0.01, at_least=0)
    """Weight of the load-balancing loss, against the mean loss of a token."""
    router_z_loss: float = key(0.0, at_least=0)
    """Weight of the router's z-loss, the mean over positions of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906), against
    the mean loss of a token; it keeps the logits small."""

    def faults(self, prefix: str) -> Iterator[Fault]:
        """Invalid sizes, alone and in combination.

        Args:
            prefix: config key of this spec.
        """
        found = list(value_faults(self, prefix))
        yield from found
        if found:
            return  # divisibility means nothing for sizes below 1
        heads, groups = self.num_attention_heads, self.num_query_groups or self.num_attention_heads
        if self.hidden_size % heads:
            yield Fault(f"{prefix}.num_attention_heads", f"{heads} does not divide hidden_size {self.hidden_size}")
        elif self.position == "rope" and self.hidden_size // heads % 2:
            yield Fault(
                f"{prefix}.num_attention_heads",
                f"rotary positions need heads of even width, it is {self.hidden_size // heads} (hidden_size "
                f"{self.hidden_size} / {heads} heads): change one of them, or use position=learned",
            )
        if heads % groups:
            yield Fault(f"{prefix}.num_query_groups", f"{groups} does not divide num_attention_heads {heads}")
        if self.num_experts:
            yield from self._expert_faults(prefix)
        else:
            for name in changed_fields(self):
                if name.startswith(("expert", "shared_expert", "router_")):
                    yield Fault(f"{prefix}.{name}", f"there are no experts, {prefix}.num_experts is 0: remove it")

    def _expert_faults(self, prefix: str) -> Iterator[Fault]:
        experts = self.num_experts
        if not 1 <= self.experts_per_token <= experts:
            yield Fault(
                f"{prefix}.experts_per_token",
                f"must be from 1 to {prefix}.num_experts {experts}, is {self.experts_per_token}",
            )
        if self.bias:
            yield Fault(f"{prefix}.bias", f"the {experts} experts of a layer have no biases: set it to false")
        if self.shared_expert_gate and not self.shared_expert_ffn_hidden_size:
            yield Fault(
                f"{prefix}.shared_expert_gate",
                f"there is no shared expert to scale, {prefix}.shared_expert_ffn_hidden_size is 0: set it, or the gate "
                "to false",
            )
