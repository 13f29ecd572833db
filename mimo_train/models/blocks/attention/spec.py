"""The sizes of attention heads, and what depends on them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from encoders.key_rules import MOST_WIDTH
from encoders.weight_map import Rule, heads, same, with_biases
from mimo_train.config.errors import Fault
from mimo_train.config.keys import key
from mimo_train.models.blocks.base import Block, Linear, Matmul, Share, Width, tp_faults
from mimo_train.models.blocks.rotary import RotaryKeys


@dataclass
class AttentionKeys(RotaryKeys):
    """Keys of attention heads."""

    num_attention_heads: int = key(12, at_least=1, at_most=MOST_WIDTH)
    """Query heads. Must divide `hidden_size`, unless `head_size` is set."""
    num_query_groups: int = key(0, at_least=0, at_most=MOST_WIDTH, zero_means="as many as query heads")
    """Key and value heads; 0: as many as query heads."""
    head_size: int = key(0, at_least=0, at_most=MOST_WIDTH, zero_means="hidden_size / num_attention_heads")
    """Width of a head; 0: `hidden_size / num_attention_heads`."""
    qkv_bias: bool = False
    """Queries, keys and values have biases."""
    proj_bias: bool = False
    """The output projection of attention has a bias."""
    window: int = key(0, at_least=0, zero_means="all")
    """Tokens that a token attends to, itself included; 0: all."""
    full_attention_layers: list[int] = key(factory=list, at_least=0)
    """Layers, counted from 0, that ignore `window`."""
    qk_norm: bool = False
    """Normalise queries and keys per head."""
    qk_norm_over_heads: bool = False
    """With `qk_norm`: normalise all heads together. `RMSNorm` only."""
    attention_output_gate: bool = False
    """Multiply the output of each head by the sigmoid of a projected gate."""
    attention_scale_size: float = key(0.0, at_least=0, zero_means="head_size")
    """Scores are divided by the square root of this; 0: of the head width."""
    attention_softcap: float = key(0.0, at_least=0, zero_means="no cap")
    """Scores become cap * tanh(score / cap); 0: no cap. Stores all scores of a sequence."""
    attention_sinks: bool = False
    """A learned score of each head takes a share of its softmax."""

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.head_size or self.hidden_size // self.num_attention_heads

    @property
    def rotary_width(self) -> int:
        """Channels of a head that rotate."""
        return int(self.head_width * self.partial_rotary_factor)

    @property
    def key_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_query_groups or self.num_attention_heads

    def window_of(self, layer: int) -> int:
        """Return the number of tokens that a token attends to in a layer, counted from 0; 0: all."""
        return 0 if layer in self.full_attention_layers else self.window

    def attention(self, layer: int) -> "Attention":
        """Return the block of a layer, counted from 0."""
        return Attention(
            self.hidden_size,
            self.num_attention_heads,
            self.key_heads,
            self.head_width,
            window=self.window_of(layer),
            rope=self.position == "rope" and layer not in self.no_rope_layers,
            head_norm_vectors=self.norm_vectors if self.qk_norm else 0,
            norm_over_heads=self.qk_norm_over_heads,
            qkv_bias=self.bias or self.qkv_bias,
            proj_bias=self.bias or self.proj_bias,
            softcap=self.attention_softcap,
            output_gate=self.attention_output_gate,
            sinks=self.attention_sinks,
        )

    def attention_faults(self, prefix: str) -> Iterator[Fault]:
        """Yield invalid combinations of keys; `prefix`: key of the spec."""
        count, groups = self.num_attention_heads, self.key_heads
        if not self.head_size and self.hidden_size % count:
            yield Fault(f"{prefix}.num_attention_heads", f"{count} does not divide hidden_size {self.hidden_size}")
        elif self.position == "rope" and self.head_width % 2:
            made_of = "" if self.head_size else f" (hidden_size {self.hidden_size} / {count} heads)"
            yield Fault(
                f"{prefix}.{'head_size' if self.head_size else 'num_attention_heads'}",
                f"rotary positions need heads of even width, it is {self.head_width}{made_of}: change "
                f"{'it' if self.head_size else 'one of them'}, or use position=learned",
            )
        elif self.position == "rope" and (self.rotary_width % 2 or not self.rotary_width):
            yield Fault(
                f"{prefix}.partial_rotary_factor",
                f"must rotate an even number of channels, rotates {self.rotary_width} of {self.head_width}",
            )
        if count % groups:
            yield Fault(f"{prefix}.num_query_groups", f"{groups} does not divide num_attention_heads {count}")
        for name in ("qkv_bias", "proj_bias"):
            if self.bias and getattr(self, name):
                yield Fault(
                    f"{prefix}.{name}",
                    f"is implied by {prefix}.bias, which gives every linear layer a bias. Set only one of them",
                )
        if self.qk_norm_over_heads:
            wrong = {"qk_norm": not self.qk_norm, "normalization": self.normalization != "RMSNorm"}
            wrong["zero_centered_norms"] = self.zero_centered_norms
            for name in (name for name, is_wrong in wrong.items() if is_wrong):
                yield Fault(
                    f"{prefix}.qk_norm_over_heads", f"is not supported with {prefix}.{name}={getattr(self, name)}"
                )
        if self.attention_sinks and self.attention_softcap:
            yield Fault(
                f"{prefix}.attention_sinks", f"is not supported with {prefix}.attention_softcap. Set one of them"
            )
        if self.local_rope_base and not self.window:
            yield Fault(
                f"{prefix}.local_rope_base",
                f"only applies to sliding-window layers, but {prefix}.window is 0. Set one of them",
            )
        yield from self.rotary_faults(prefix, self.rotary_width)


@dataclass(frozen=True)
class Attention(Block):
    """Heads of queries, with a key and a value for each group of them, and a projection of their outputs."""

    kind = "attention"

    hidden: int
    heads: int
    key_heads: int
    width: int
    """Width of a head."""
    window: int = 0
    """Tokens that a token attends to; 0: all."""
    rope: bool = False
    head_norm_vectors: int = 0
    """Vectors of parameters of the norms of queries and of keys; 0: no norms."""
    norm_over_heads: bool = False
    """True if one norm has the heads of all queries, another those of all keys."""
    qkv_bias: bool = False
    proj_bias: bool = False
    softcap: float = 0.0
    output_gate: bool = False
    sinks: bool = False

    @property
    def query_width(self) -> int:
        """Width of all queries, of their gates, and of the input of the output projection."""
        return self.width * self.heads

    @property
    def qkv_width(self) -> int:
        """Width of all queries, gates, keys and values."""
        return self.width * ((1 + self.output_gate) * self.heads + 2 * self.key_heads)

    def parameters(self) -> tuple[int, int]:
        split = self.hidden * (self.qkv_width + self.query_width) + (self.qkv_width if self.qkv_bias else 0)
        split += self.heads if self.sinks else 0
        norms = self.width * self.head_norm_vectors
        if self.norm_over_heads:
            split, norms = split + norms * (self.heads + self.key_heads), 0
        return split, (self.hidden if self.proj_bias else 0) + 2 * norms

    def matrices(self, tp: int, ep: int, etp: int) -> int:
        return self.hidden * ((self.qkv_width + self.query_width) // tp)

    def matmuls(self, layer: str, tokens: float, pairs: float | None = None) -> Iterator[Matmul]:
        """See `Block`. Core attention is q.k and weights.v, 2 FLOPs each for each channel and pair of tokens."""
        if pairs is None:
            seen = min(self.window or tokens, tokens)
            pairs = seen * (seen + 1) / 2 + (tokens - seen) * seen
        attention, core = f"{layer}.self_attention", 4 * self.query_width * pairs
        yield Matmul(f"{attention}.linear_qkv.weight", 2 * tokens * self.hidden * self.qkv_width, core, True)
        yield Matmul(f"{attention}.linear_proj.weight", 2 * tokens * self.query_width * self.hidden, in_layer=True)

    def linears(self, layer: str, number: int) -> Iterator[Linear]:
        queries = (1 + self.output_gate) * self.heads // self.key_heads * self.width
        qkv = (("q_proj", queries), ("k_proj", self.width), ("v_proj", self.width))
        attention, output = f"{layer}.self_attention", (("o_proj", self.hidden),)
        yield Linear(f"{attention}.linear_qkv", self.hidden, qkv, self.key_heads, True, layer=number)
        yield Linear(f"{attention}.linear_proj", self.query_width, output, column=False, layer=number)

    def kept(self, share: Share) -> tuple[int, int]:
        """Return queries, keys, values and the output of attention (2 h + 2 k), and rotated queries and keys (h + k,
        since the values keep the unrotated ones alive).

        Context parallelism gathers keys and values (2 k of each rank instead), and a copy joins the attention of the
        two chunks of queries (h). One kernel for packed rows, and attention under a mask, copy the values, which frees
        the fused tensor, and need as many key heads as query heads (4 h in total). Norms of grouped heads copy the
        queries. An output gate is kept with its sigmoid and the gated output (3 h). Sinks copy queries, keys, values
        and output (2 h + 2 k). Norms over all heads keep queries and keys, and these normalised, in fp32.
        """
        # With fewer key heads than tensor-parallel ranks, each rank has one.
        query, keys = self.query_width, self.width * max(self.key_heads, share.tp)
        numbers = 2 * query + 2 * keys + (query + keys if self.rope else 0)
        if share.cp > 1:
            numbers = (3 if self.rope else 2) * query + 2 * keys * share.cp
        elif share.whole_rows:
            numbers = 4 * query
        if self.head_norm_vectors and query != keys:
            numbers += query
        if self.output_gate:
            numbers += 3 * query
        if self.sinks:
            numbers += 2 * query + 2 * keys * share.cp
        in_fp32 = 2 * (query + keys) if self.norm_over_heads else 0
        return numbers * share.size + in_fp32 * 4, 0

    def scores(self, sequence: int, samples: int, tp: int, cp: int) -> int:
        """Return the bytes of soft-capped scores: tanh and softmax, 4 + 4 bytes in fp32, 2 + 4 + 2 in half precision
        with the rounded weights."""
        return samples * self.heads // tp * sequence * sequence // cp * 8 if self.softcap else 0

    def widths(self) -> dict[str, Width]:
        return {"queries": (self.query_width, "tp"), "queries, keys and values": (self.qkv_width, "tp")}

    def needs_torch(self, cp: int) -> str:
        """See `Block`. Transformer Engine's attention caps no scores, nor has sinks in every version. It supports
        windows with context parallelism only by exchanges that Megatron-Core does not use by default."""
        if self.softcap or self.sinks:
            return f"llm.attention_{'softcap' if self.softcap else 'sinks'} requires torch's attention"
        if self.norm_over_heads:
            return "llm.qk_norm_over_heads requires torch's layers"
        if self.window and cp > 1:
            return f"llm.window with layout.cp {cp} requires torch's attention"
        return ""

    def layout_faults(self, layout: Any, key: str) -> Iterator[Fault]:
        """See `Block`. Ranks that share a key head gather its queries, keys and values, of which each has a part."""
        tp, sizes = layout.tp, {"num_attention_heads": self.heads}
        yield from tp_faults(tp, key, **sizes | ({"num_query_groups": self.key_heads} if self.key_heads >= tp else {}))
        if self.key_heads >= tp:
            return
        if self.norm_over_heads:
            yield Fault(
                f"{key}.layout.tp",
                f"tp {tp} must be at most num_query_groups {self.key_heads}, whose norm is over all heads "
                f"({key}.llm.qk_norm_over_heads)",
            )
            return
        if tp % self.key_heads:
            yield Fault(
                f"{key}.layout.tp",
                f"num_query_groups {self.key_heads} neither is a multiple of tp {tp} nor divides it: use a divisor or "
                f"a multiple of {self.key_heads}",
            )
        elif self.qkv_width % tp:
            yield Fault(
                f"{key}.layout.tp",
                f"tp {tp} does not divide the {self.qkv_width} outputs of queries, keys and values "
                f"({(1 + self.output_gate) * self.heads} + 2 x {self.key_heads} heads of {self.width}): use a smaller "
                "tp",
            )

    def rules(self, ours: str, theirs: str, names: Mapping[str, str]) -> Iterator[Rule]:
        """See `Block`. Names: `query`, `key`, `value`, `out`, with norms `query_norm` and `key_norm`, and `sinks` with
        its last part; `fused`: one tensor of all queries, keys and values instead of three."""
        attention = f"{ours}self_attention."
        parts = ["fused"] * 3 if "fused" in names else ["query", "key", "value"]
        qkv = heads(
            f"{attention}linear_qkv.weight",
            *(f"{theirs}{names[part]}.weight" for part in parts),
            groups=self.key_heads,
            per_group=self.heads // self.key_heads,
            size=self.width,
            firsts=(0, self.query_width, self.query_width + self.width * self.key_heads) if "fused" in names else (),
            gates=self.output_gate,
        )
        proj = same(f"{attention}linear_proj.weight", f"{theirs}{names['out']}.weight", self.hidden)
        yield from with_biases([qkv]) if self.qkv_bias else [qkv]
        yield from with_biases([proj]) if self.proj_bias else [proj]
        if self.head_norm_vectors:
            for part, name, count in (("q", "query_norm", self.heads), ("k", "key_norm", self.key_heads)):
                size = self.width * (count if self.norm_over_heads else 1)
                yield same(f"{attention}{part}_layernorm.weight", f"{theirs}{names[name]}.weight", size)
        if self.sinks:
            yield same(f"{attention}core_attention.softmax_offset", f"{theirs}{names['sinks']}", self.heads)
