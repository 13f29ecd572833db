"""What a language model is made of: sizes, and the arithmetic that follows from them. Imports no torch."""

from dataclasses import dataclass


@dataclass
class LlmSpec:
    """Sizes of a decoder-only language model built from Megatron-Core layers."""

    name: str = "gpt"
    """Free name, shown in tables."""
    num_layers: int = 12
    """Transformer layers over all pipeline stages."""
    hidden_size: int = 768
    """Width of the residual stream."""
    num_attention_heads: int = 12
    """Query heads."""
    num_query_groups: int = 0
    """Key and value heads (grouped-query attention); 0 means as many as query heads."""
    ffn_hidden_size: int = 3072
    """Width of the feed-forward block (of each of its two halves with swiglu)."""
    normalization: str = "RMSNorm"
    """RMSNorm or LayerNorm."""
    layernorm_epsilon: float = 1e-5
    """Epsilon of every norm."""
    activation: str = "swiglu"
    """swiglu, gelu or silu."""
    bias: bool = False
    """Whether linear layers have biases."""
    position: str = "rope"
    """rope (rotary) or learned (absolute)."""
    rope_base: int = 10000
    """Base period of rotary position embeddings."""
    qk_norm: bool = False
    """Whether queries and keys are normalised per head."""
    tie_embeddings: bool = True
    """Whether the output layer shares the input embedding's weights."""
    dropout: float = 0.0
    """Dropout probability of hidden states and attention."""
    init_std: float = 0.02
    """Standard deviation of the initial weights."""
    num_experts: int = 0
    """Experts of every layer's feed-forward block (mixture of experts); 0: a dense model."""
    experts_per_token: int = 2
    """Experts that the router picks for a token."""
    expert_ffn_hidden_size: int = 0
    """Width of one expert; 0 means ffn_hidden_size."""
    shared_expert_ffn_hidden_size: int = 0
    """Width of the expert that every token passes; 0: none."""
    shared_expert_gate: bool = False
    """Whether a learned gate scales the shared expert's output."""
    router_balancing: str = "seq_aux_loss"
    """Balancing over a microbatch (aux_loss), over each sequence (seq_aux_loss; the same at every layout), over all
    data-parallel ranks (global_aux_loss), or none."""
    router_aux_loss: float = 0.01
    """Weight of the load-balancing loss."""

    def num_parameters(self, vocab_size: int, sequence_length: int) -> int:
        """Number of parameters, embeddings included."""
        hidden, ffn = self.hidden_size, self.ffn_hidden_size
        head = hidden // self.num_attention_heads
        qkv = head * (self.num_attention_heads + 2 * (self.num_query_groups or self.num_attention_heads))
        norm = hidden * (2 if self.normalization == "LayerNorm" else 1)
        up = 2 if self.activation == "swiglu" else 1
        layer = hidden * qkv + self.num_attention_heads * head * hidden + 2 * norm
        if self.num_experts:
            expert, shared = self.expert_ffn_hidden_size or ffn, self.shared_expert_ffn_hidden_size
            layer += self.num_experts * (hidden + (up + 1) * expert * hidden) + (up + 1) * shared * hidden
            layer += hidden if self.shared_expert_gate else 0
        else:
            layer += (up + 1) * ffn * hidden
            layer += (qkv + hidden + up * ffn + hidden) if self.bias else 0
        if self.qk_norm:
            layer += 2 * head * (2 if self.normalization == "LayerNorm" else 1)
        embeddings = vocab_size * hidden * (1 if self.tie_embeddings else 2)
        embeddings += sequence_length * hidden if self.position == "learned" else 0
        return embeddings + self.num_layers * layer + norm
