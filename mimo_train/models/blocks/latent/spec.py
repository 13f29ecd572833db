"""The sizes of latent attention, whose keys and values are made of one narrow vector for each token, and what depends
on them (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from encoders.key_rules import MOST_WIDTH
from encoders.weight_map import Rule, same
from mimo_train.config.errors import Fault
from mimo_train.config.keys import changed_fields, key
from mimo_train.models.blocks.base import Block, LayerKeys, Linear, Matmul, Share, Width, tp_faults

_OTHERS = (
    *("num_query_groups", "head_size", "qkv_bias", "proj_bias", "bias", "window", "qk_norm", "attention_softcap"),
    *("partial_rotary_factor", "mrope_section", "local_rope_base", "position", "zero_centered_norms", "normalization"),
    *("attention_output_gate", "attention_sinks", "linear_attention_layers", "no_rope_layers", "rope_interleaved"),
)
"""Keys of models without latent attention."""


@dataclass
class LatentKeys(LayerKeys):
    """Keys of latent attention."""

    kv_lora_rank: int = key(0, at_least=0, at_most=MOST_WIDTH, zero_means="no latent attention")
    """Latent attention (MLA, arXiv 2405.04434): width of the latents of keys and values; 0: plain heads."""
    q_lora_rank: int = key(0, at_least=0, at_most=MOST_WIDTH, zero_means="queries without latents")
    """Latent attention: width of the latents of queries; 0: none."""
    qk_nope_head_dim: int = key(0, at_least=0, at_most=MOST_WIDTH)
    """Latent attention: channels of a query or key that do not rotate."""
    qk_rope_head_dim: int = key(0, at_least=0, at_most=MOST_WIDTH)
    """Latent attention: channels of a query or key that rotate."""
    v_head_dim: int = key(0, at_least=0, at_most=MOST_WIDTH)
    """Latent attention: width of a value head."""

    def latent_faults(self, prefix: str) -> Iterator[Fault]:
        """Yield invalid combinations of keys; `prefix`: key of the spec."""
        if not self.kv_lora_rank:
            for name in ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
                if getattr(self, name):
                    yield Fault(f"{prefix}.{name}", f"requires {prefix}.kv_lora_rank. Remove it")
            return
        for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            if not getattr(self, name):
                yield Fault(f"{prefix}.{name}", f"is required by {prefix}.kv_lora_rank {self.kv_lora_rank}. Set it")
        if self.qk_rope_head_dim % 2:
            yield Fault(f"{prefix}.qk_rope_head_dim", f"must be even, is {self.qk_rope_head_dim}")
        if self.v_head_dim > self.qk_nope_head_dim + self.qk_rope_head_dim:
            yield Fault(
                f"{prefix}.v_head_dim",
                f"must be at most the {self.qk_nope_head_dim} + {self.qk_rope_head_dim} channels of a key, is "
                f"{self.v_head_dim}",
            )
        for name in sorted({*changed_fields(self)} & {*_OTHERS}):
            yield Fault(f"{prefix}.{name}", f"is not supported with {prefix}.kv_lora_rank. Remove it")


@dataclass(frozen=True)
class Latent(Block):
    """Heads whose keys and values, and often queries, are projected from latents; one rotating key for all heads."""

    kind = "latent"

    hidden: int
    heads: int
    q_rank: int
    """0: queries are projected from hidden states."""
    kv_rank: int
    nope: int
    rope: int
    value: int

    @property
    def key_width(self) -> int:
        """Width of a query or a key."""
        return self.nope + self.rope

    @property
    def _column(self) -> list[tuple[str, str, int, int]]:
        """(our name, PEFT's, inputs, outputs) of the linear layers that tensor parallelism splits by heads."""
        queries = self.heads * self.key_width
        query = ("q_up", "q_b", self.q_rank, queries) if self.q_rank else ("q", "q", self.hidden, queries)
        return [query, ("kv_up", "kv_b", self.kv_rank, self.heads * (self.nope + self.value))]

    @property
    def _down(self) -> list[tuple[str, int]]:
        """(name, outputs) of the linear layers from hidden states to latents, which each rank has."""
        return [*([("q_down", self.q_rank)] if self.q_rank else []), ("kv_down", self.kv_rank + self.rope)]

    def parameters(self) -> tuple[int, int]:
        """See `Block`. Projections to latents, and their norms, are on every rank."""
        return self.matrices(1, 1, 1), self.hidden * sum(width for _, width in self._down) + self.q_rank + self.kv_rank

    def matrices(self, tp: int, ep: int, etp: int) -> int:
        """See `Block`. Projections to latents are never in fp8."""
        split = sum(inputs * outputs for _, _, inputs, outputs in self._column)
        return (split + self.heads * self.value * self.hidden) // tp

    def matmuls(self, layer: str, tokens: float, pairs: float | None = None) -> Iterator[Matmul]:
        """See `Block`. Core attention as in `Attention.matmuls`, with values that are narrower than keys."""
        attention, pairs = f"{layer}.self_attention", tokens * (tokens + 1) / 2 if pairs is None else pairs
        for name, width in self._down:
            forward = 2 * tokens * self.hidden * width
            yield Matmul(f"{attention}.linear_{name}_proj.weight", forward, in_layer=True, input_gradient=False)
        for name, _, inputs, outputs in self._column:
            core = 2 * self.heads * (self.key_width + self.value) * pairs if name == "kv_up" else 0.0
            yield Matmul(f"{attention}.linear_{name}_proj.weight", 2 * tokens * inputs * outputs, core, True)
        output = 2 * tokens * self.heads * self.value * self.hidden
        yield Matmul(f"{attention}.linear_proj.weight", output, in_layer=True)

    def linears(self, layer: str, number: int) -> Iterator[Linear]:
        """See `Block`. Projections to latents get no adapters."""
        attention = f"{layer}.self_attention"
        for name, theirs, inputs, outputs in self._column:
            yield Linear(f"{attention}.linear_{name}_proj", inputs, ((f"{theirs}_proj", outputs),), layer=number)
        output = (("o_proj", self.hidden),)
        yield Linear(f"{attention}.linear_proj", self.heads * self.value, output, column=False, layer=number)

    def kept(self, share: Share) -> tuple[int, int]:
        """Return latents before and after their norms, queries before and after they rotate (the second with keys and
        values), keys, values with the keys' part that does not rotate, and the output of attention. Context
        parallelism gathers keys and values instead, and a copy joins the attention of the two chunks of queries."""
        heads, key, value = self.heads, self.key_width, self.value
        numbers = heads * (2 * key + self.nope + 2 * value)
        if share.cp > 1:
            numbers = heads * (key + 2 * value + (key + value) * share.cp)
        latents = 2 * (self.q_rank + self.kv_rank) + self.rope
        return numbers * share.size, share.local_tokens * latents * share.size

    def widths(self) -> dict[str, Width]:
        return {}

    def needs_torch(self, cp: int) -> str:
        return f"llm.kv_lora_rank {self.kv_rank} requires torch's attention"

    def layout_faults(self, layout: Any, key: str) -> Iterator[Fault]:
        yield from tp_faults(layout.tp, key, num_attention_heads=self.heads)

    def rules(self, ours: str, theirs: str, names: Mapping[str, str]) -> Iterator[Rule]:
        """See `Block`. Names: `q` or `q_down`, `q_norm` and `q_up`; `kv_down`, `kv_norm`, `kv_up` and `out`."""
        attention = f"{ours}self_attention."
        rows = {**dict(self._down), **{name: outputs for name, _, _, outputs in self._column}}
        for name, count in rows.items():
            yield same(f"{attention}linear_{name}_proj.weight", f"{theirs}{names[name]}.weight", count)
        for name, count in (("q", self.q_rank), ("kv", self.kv_rank)):
            if count:
                yield same(f"{attention}{name}_layernorm.weight", f"{theirs}{names[f'{name}_norm']}.weight", count)
        yield same(f"{attention}linear_proj.weight", f"{theirs}{names['out']}.weight", self.hidden)
