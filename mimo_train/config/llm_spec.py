"""Sizes of a language model, and their checks."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from encoders import key_rules
from mimo_train.config.errors import Fault
from mimo_train.config.keys import Section, changed_fields, key, shown, value_faults

GATED = ("swiglu", "geglu")
"""Gated activations."""

MOST_LAYERS, MOST_WIDTH = key_rules.MOST_LAYERS, key_rules.MOST_WIDTH
"""Maximum numbers of layers, and of heads and widths."""


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
    """`default` (unchanged), `linear`, `llama3`, `yarn` (arXiv 2309.00071), or `dynamic`: unchanged up to
    `max_positions`, an error beyond."""
    factor: float = key(1.0, above=0)
    """Factor by which sequences are longer."""
    original_positions: int = key(0, at_least=0)
    """Positions of the original training; required by `llama3` and `yarn`."""
    low_frequency_factor: float = key(1.0, above=0)
    """`llama3`: waves longer than `original_positions` divided by this are stretched by the full factor."""
    high_frequency_factor: float = key(4.0, above=0)
    """`llama3`: waves shorter than `original_positions` divided by this are not stretched."""
    beta_fast: float = key(32.0, above=0)
    """`yarn`: waves with more turns in `original_positions` are not stretched."""
    beta_slow: float = key(1.0, above=0)
    """`yarn`: waves with fewer turns are stretched by the full factor."""
    attention_factor: float = key(0.0, at_least=0, zero_means="from factor, mscale and mscale_all_dim")
    """`yarn`: factor of rotated queries and keys; 0: from `factor`, `mscale` and `mscale_all_dim`."""
    mscale: float = key(0.0, at_least=0)
    """`yarn`: with `mscale_all_dim`, gives the attention factor; 0: not used."""
    mscale_all_dim: float = key(0.0, at_least=0)
    """`yarn`: see `mscale`; 0: not used."""
    truncate: bool = True
    """`yarn`: round the ends of the range between the two betas to whole frequencies."""

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
class LlmSpec(Section):
    """Sizes of a decoder-only language model of Megatron-Core layers."""

    name: str = "gpt"
    """Free name, shown in tables."""
    num_layers: int = key(12, at_least=1, at_most=MOST_LAYERS)
    """Transformer layers over all pipeline stages."""
    hidden_size: int = key(768, at_least=1, at_most=MOST_WIDTH)
    """Width of the residual stream."""
    num_attention_heads: int = key(12, at_least=1, at_most=MOST_WIDTH)
    """Query heads. Must divide `hidden_size`, unless `head_size` is set."""
    num_query_groups: int = key(0, at_least=0, at_most=MOST_WIDTH, zero_means="as many as query heads")
    """Key and value heads. Must divide `num_attention_heads`; 0: as many as query heads."""
    head_size: int = key(0, at_least=0, at_most=MOST_WIDTH, zero_means="hidden_size / num_attention_heads")
    """Width of a head; 0: `hidden_size / num_attention_heads`. Must be even with `position: rope`."""
    ffn_hidden_size: int = key(3072, at_least=1, at_most=MOST_WIDTH)
    """Width of the feed-forward block; with a gate, of each half."""
    vocab_size: int = key(0, at_least=0, at_most=2**28, zero_means="as many as the tokenizer has tokens")
    """Rows of the embedding; 0: as many as tokens. Rows beyond a `pretrained` model's are initialised. Padded to a
    multiple of 128."""
    max_positions: int = key(0, at_least=0, zero_means="not known")
    """Longest sequence that the model was made for; 0: unknown. A bound only with `rope_scaling.kind: dynamic`."""
    normalization: str = key("RMSNorm", choices=("RMSNorm", "LayerNorm"))
    """`RMSNorm` or `LayerNorm`."""
    layernorm_epsilon: float = key(1e-5, above=0, below=1)
    """Epsilon of every norm."""
    zero_centered_norms: bool = False
    """Norms multiply by 1 + weight, head norms too. `RMSNorm` only."""
    post_norms: bool = False
    """Normalise the outputs of attention and of the feed-forward block before adding them."""
    activation: str = key("swiglu", choices=(*GATED, "gelu", "silu"))
    """`swiglu`, `geglu` (gated, with the tanh form of GELU), `gelu` or `silu`."""
    bias: bool = False
    """Linear layers have biases. Not with experts."""
    qkv_bias: bool = False
    """Queries, keys and values have biases though other linear layers have none."""
    proj_bias: bool = False
    """The output projection of attention has a bias though the feed-forward block has none."""
    position: str = key("rope", choices=("rope", "learned"))
    """`rope` (rotary) or `learned` (absolute). `learned` ties a checkpoint to its `data.sequence_length`."""
    rope_base: float = key(10000.0, at_least=1)
    """Base period of rotary positions."""
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    """How frequencies are changed for longer sequences."""
    mrope_section: list[int] = key(factory=list, at_least=0)
    """Frequencies of a head that turn by time, row and column (M-RoPE, arXiv 2409.12191): three numbers. Empty: all
    turn by the position in the sequence."""
    mrope_interleaved: bool = False
    """With `mrope_section`: axes alternate by frequency, as in Qwen3-VL."""
    local_rope_base: float = key(0.0, at_least=0, zero_means="as in the other layers")
    """Base period in layers with a `window`, without scaling; 0: as in the other layers."""
    window: int = key(0, at_least=0, zero_means="all")
    """Tokens that a token attends to, itself and earlier ones; 0: all."""
    full_attention_layers: list[int] = key(factory=list, at_least=0)
    """Layers, counted from 0, that ignore `window`."""
    qk_norm: bool = False
    """Normalise queries and keys per head."""
    attention_scale_size: float = key(0.0, at_least=0, zero_means="head_size")
    """Attention scores are divided by the square root of this; 0: of the head width."""
    attention_softcap: float = key(0.0, at_least=0, zero_means="no cap")
    """Attention scores become cap * tanh(score / cap); 0: no cap. Stores all scores of a sequence."""
    logit_softcap: float = key(0.0, at_least=0, zero_means="no cap")
    """Logits become cap * tanh(logit / cap); 0: no cap."""
    scale_embeddings: bool = False
    """Multiply token embeddings by sqrt(`hidden_size`), not features of media."""
    tie_embeddings: bool = True
    """The output layer shares the input embedding's weights."""
    dropout: float = key(0.0, at_least=0, below=1)
    """Dropout probability of hidden states and attention."""
    init_std: float = key(0.02, at_least=0, at_most=1000)
    """Standard deviation of the initial weights."""
    num_experts: int = key(0, at_least=0, at_most=2**16)
    """Experts of every layer; 0: a dense model. See docs/layouts.md#experts."""
    experts_per_token: int = key(2, at_least=0, at_most=2**16)
    """Experts per token. From 1 to `num_experts`."""
    router_renormalise: bool = True
    """Softmax over the chosen experts. `false`, or one expert per token: softmax over all."""
    dense_layers: list[int] = key(factory=list, at_least=0)
    """Layers, counted from 0, without experts; their width is `ffn_hidden_size`."""
    expert_ffn_hidden_size: int = key(0, at_least=0, at_most=MOST_WIDTH)
    """Width of one expert; 0: `ffn_hidden_size`."""
    shared_expert_ffn_hidden_size: int = key(0, at_least=0, at_most=MOST_WIDTH)
    """Width of the expert that every token uses; 0: none."""
    shared_expert_gate: bool = False
    """A learned gate scales the shared expert's output."""
    router_balancing: str = key("seq_aux_loss", choices=("seq_aux_loss", "aux_loss", "global_aux_loss", "none"))
    """Load balancing over each sequence (`seq_aux_loss`), the microbatch of each rank (`aux_loss`), all data-parallel
    ranks (`global_aux_loss`), or `none`."""
    router_aux_loss: float = key(0.01, at_least=0)
    """Weight of the load-balancing loss, relative to the mean loss of a token."""
    router_z_loss: float = key(0.0, at_least=0)
    """Weight of the z-loss (ST-MoE, arXiv 2202.08906), relative to the mean loss of a token."""

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.head_size or self.hidden_size // self.num_attention_heads

    @property
    def key_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def query_width(self) -> int:
        """Width of all queries, and of the input of attention's output projection."""
        return self.head_width * self.num_attention_heads

    @property
    def qkv_width(self) -> int:
        """Width of all queries, keys and values."""
        return self.head_width * (self.num_attention_heads + 2 * self.key_heads)

    @property
    def is_gated(self) -> bool:
        """True if the feed-forward block is gated."""
        return self.activation in GATED

    @property
    def expert_width(self) -> int:
        """Width of one expert."""
        return self.expert_ffn_hidden_size or self.ffn_hidden_size

    @property
    def softmax_over_all_experts(self) -> bool:
        """True if the router's softmax covers all experts: over a single one it would be 1, without a gradient."""
        return not self.router_renormalise or self.experts_per_token == 1

    @property
    def balances_microbatches(self) -> bool:
        """True if expert loads are balanced over a microbatch of ranks; losses depend on the layout then."""
        return bool(self.num_experts) and self.router_balancing in ("aux_loss", "global_aux_loss")

    def has_experts(self, layer: int) -> bool:
        """True if a layer, counted from 0, is a mixture of experts."""
        return bool(self.num_experts) and layer not in self.dense_layers

    def window_of(self, layer: int) -> int:
        """Return the number of tokens that a token attends to in a layer, counted from 0; 0: all."""
        return 0 if layer in self.full_attention_layers else self.window

    def faults(self, prefix: str) -> Iterator[Fault]:
        """Yield invalid sizes, alone and in combination; `prefix`: config key of this spec."""
        faults = list(value_faults(self, prefix))
        faults += self.rope_scaling.faults(f"{prefix}.rope_scaling", self.max_positions)
        yield from faults
        if faults:
            return  # divisibility is undefined for sizes below 1
        heads, groups = self.num_attention_heads, self.key_heads
        if not self.head_size and self.hidden_size % heads:
            yield Fault(f"{prefix}.num_attention_heads", f"{heads} does not divide hidden_size {self.hidden_size}")
        elif self.position == "rope" and self.head_width % 2:
            made_of = "" if self.head_size else f" (hidden_size {self.hidden_size} / {heads} heads)"
            yield Fault(
                f"{prefix}.{'head_size' if self.head_size else 'num_attention_heads'}",
                f"rotary positions need heads of even width, it is {self.head_width}{made_of}: change "
                f"{'it' if self.head_size else 'one of them'}, or use position=learned",
            )
        if heads % groups:
            yield Fault(f"{prefix}.num_query_groups", f"{groups} does not divide num_attention_heads {heads}")
        yield from self._option_faults(prefix)
        yield from self._layer_faults(prefix)
        if self.num_experts:
            yield from self._expert_faults(prefix)
        else:
            for name in changed_fields(self):
                if name.startswith(("expert", "shared_expert", "router_")):
                    yield Fault(f"{prefix}.{name}", f"requires experts, but {prefix}.num_experts is 0. Remove it")

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

    def _option_faults(self, prefix: str) -> Iterator[Fault]:
        """Yield faults of options whose prerequisite is off."""
        if self.zero_centered_norms and self.normalization != "RMSNorm":
            yield Fault(
                f"{prefix}.zero_centered_norms", f"requires RMSNorm, but {prefix}.normalization is {self.normalization}"
            )
        for name in ("qkv_bias", "proj_bias"):
            if self.bias and getattr(self, name):
                yield Fault(
                    f"{prefix}.{name}",
                    f"is implied by {prefix}.bias, which gives every linear layer a bias. Set only one of them",
                )
        if self.position != "rope":
            if self.rope_base != LlmSpec.rope_base:
                yield Fault(
                    f"{prefix}.rope_base", f"requires rotary positions, but {prefix}.position is {self.position}"
                )
            kind = "rope_scaling.kind" if self.rope_scaling.kind != "default" else ""
            for name in filter(None, (kind, "local_rope_base" if self.local_rope_base else "")):
                yield Fault(f"{prefix}.{name}", f"requires rotary positions, but {prefix}.position is {self.position}")
        yield from self._axis_faults(prefix)
        if self.local_rope_base and not self.window:
            yield Fault(
                f"{prefix}.local_rope_base",
                f"only applies to sliding-window layers, but {prefix}.window is 0. Set one of them",
            )

    def _axis_faults(self, prefix: str) -> Iterator[Fault]:
        section = self.mrope_section
        if not section:
            if self.mrope_interleaved:
                yield Fault(f"{prefix}.mrope_interleaved", f"requires {prefix}.mrope_section, which is empty")
            return
        if len(section) != 3 or min(section) < 0 or 2 * sum(section) != self.head_width:
            yield Fault(
                f"{prefix}.mrope_section",
                f"must be 3 numbers of at least 0 that make {self.head_width // 2} together, half the width "
                f"{self.head_width} of a head, is {section}",
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

    def _layer_faults(self, prefix: str) -> Iterator[Fault]:
        """Yield faults of layer lists with invalid layers, or without effect."""
        needed = {"full_attention_layers": "window", "dense_layers": "num_experts"}
        for name, other in needed.items():
            layers: list[int] = getattr(self, name)
            wrong = [layer for layer in layers if not 0 <= layer < self.num_layers]
            if wrong or len(set(layers)) < len(layers):
                yield Fault(
                    f"{prefix}.{name}",
                    f"must name layers from 0 to {self.num_layers - 1}, each once ({prefix}.num_layers is "
                    f"{self.num_layers}), is {layers}",
                )
            elif layers and not getattr(self, other):
                yield Fault(f"{prefix}.{name}", f"requires {prefix}.{other} above 0. Remove it")
        if self.num_experts and len(set(self.dense_layers)) >= self.num_layers:
            yield Fault(f"{prefix}.dense_layers", f"names all layers. Set {prefix}.num_experts=0 instead")
