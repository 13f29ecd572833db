"""The sizes of Gated DeltaNet, linear attention with a state instead of keys and values of all tokens, and what
depends on them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from encoders.key_rules import MOST_WIDTH
from encoders.weight_map import Rows, Rule, same
from mimo_train.config.errors import Fault
from mimo_train.config.keys import changed_fields, key
from mimo_train.models.blocks.base import Block, LayerKeys, Linear, Matmul, Share, Width

CHUNK = 64
"""Tokens after which the kernels store the state."""
IN_PROJ = ("qkv", "z", "b", "a")
"""Projections of a Gated DeltaNet's inputs, in the order of the rows of its fused weight."""


@dataclass
class DeltaKeys(LayerKeys):
    """Keys of layers with Gated DeltaNet."""

    linear_attention_layers: list[int] = key(factory=list, at_least=0)
    """Layers, counted from 0, with Gated DeltaNet (arXiv 2412.06464) instead of attention heads."""
    linear_num_key_heads: int = key(16, at_least=1, at_most=MOST_WIDTH)
    """Gated DeltaNet: query and key heads."""
    linear_num_value_heads: int = key(32, at_least=1, at_most=MOST_WIDTH)
    """Gated DeltaNet: value heads."""
    linear_key_head_dim: int = key(128, at_least=1, at_most=MOST_WIDTH)
    """Gated DeltaNet: width of a query or key head."""
    linear_value_head_dim: int = key(128, at_least=1, at_most=MOST_WIDTH)
    """Gated DeltaNet: width of a value head."""
    linear_conv_kernel_dim: int = key(4, at_least=1, at_most=1024)
    """Gated DeltaNet: tokens that its convolution sees."""

    def delta(self) -> "Delta":
        """Return the block of a layer with Gated DeltaNet."""
        return Delta(
            self.hidden_size,
            self.linear_num_key_heads,
            self.linear_num_value_heads,
            self.linear_key_head_dim,
            self.linear_value_head_dim,
            self.linear_conv_kernel_dim,
        )

    def delta_faults(self, prefix: str) -> Iterator[Fault]:
        """Yield invalid combinations of keys; `prefix`: key of the spec."""
        if not self.linear_attention_layers:
            for name in changed_fields(self):
                if name.startswith("linear_"):
                    yield Fault(f"{prefix}.{name}", f"requires {prefix}.linear_attention_layers. Remove it")
            return
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        if values % keys:
            yield Fault(f"{prefix}.linear_num_value_heads", f"must be a multiple of {keys} key heads, is {values}")
        unsupported = {"bias": self.bias, "normalization": self.normalization != "RMSNorm"}
        for name in (name for name, is_set in unsupported.items() if is_set):
            yield Fault(f"{prefix}.{name}", f"is not supported with {prefix}.linear_attention_layers")


@dataclass(frozen=True)
class Delta(Block):
    """A projection to queries, keys, values and gates, a causal convolution, the gated delta rule, a gated norm of each
    head, and a projection of its outputs."""

    kind = "delta"

    hidden: int
    key_heads: int
    value_heads: int
    key_size: int
    """Width of a query or key head."""
    value_size: int
    """Width of a value head."""
    kernel: int

    @property
    def keys(self) -> int:
        """Width of all queries, and of all keys."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """Width of all values, and of the input of the output projection."""
        return self.value_heads * self.value_size

    @property
    def conv_sections(self) -> tuple[int, ...]:
        """Channels of the convolution: queries, keys and values. Tensor parallelism cuts each."""
        return self.keys, self.keys, self.values

    @property
    def sections(self) -> tuple[int, ...]:
        """Rows of the input projection: queries, keys, values, output gates, beta and alpha. Tensor parallelism cuts
        each."""
        return (*self.conv_sections, self.values, self.value_heads, self.value_heads)

    def parameters(self) -> tuple[int, int]:
        """See `Block`. Every rank has the norm of a head."""
        return self.matrices(1, 1, 1) + sum(self.conv_sections) * self.kernel + 2 * self.value_heads, self.value_size

    def matrices(self, tp: int, ep: int, etp: int) -> int:
        return self.hidden * ((sum(self.sections) + self.values) // tp)

    def matmuls(self, layer: str, tokens: float, pairs: float | None = None) -> Iterator[Matmul]:
        """See `Block`. The rule takes three products with the state of a head for each token: what the state holds for
        the key, its update, and the output; 2 FLOPs for each of its numbers. The convolution takes 2 for each number of
        its kernel."""
        block = f"{layer}.self_attention"
        state = self.value_heads * self.key_size * self.value_size
        core = tokens * (6 * state + 2 * self.kernel * sum(self.conv_sections))
        yield Matmul(f"{block}.in_proj.weight", 2 * tokens * self.hidden * sum(self.sections), core, True)
        yield Matmul(f"{block}.out_proj.weight", 2 * tokens * self.values * self.hidden, in_layer=True)

    def linears(self, layer: str, number: int) -> Iterator[Linear]:
        """See `Block`. Names of projections are those of Qwen3.5."""
        block = f"{layer}.self_attention"
        rows = (sum(self.conv_sections), self.values, self.value_heads, self.value_heads)
        projections = tuple((f"in_proj_{name}", count) for name, count in zip(IN_PROJ, rows, strict=True))
        yield Linear(
            f"{block}.in_proj",
            self.hidden,
            projections,
            sections=((projections[0][0], self.conv_sections),),
            layer=number,
        )
        yield Linear(f"{block}.out_proj", self.values, (("out_proj", self.hidden),), column=False, layer=number)

    def kept(self, share: Share) -> tuple[int, int]:
        """Return the projected inputs (2 q + 2 v), the outputs of the convolution (2 q + v), normed queries and keys of
        every value head (2 k), copies of values and gates (2 v), the outputs of the rule and of the gated norm (2 v),
        and in fp32 the state behind every chunk."""
        every_key = self.value_heads * self.key_size
        numbers = 4 * self.keys + 2 * every_key + 7 * self.values + 6 * self.value_heads
        states = self.value_heads * self.key_size * self.value_size // CHUNK
        return numbers * share.size + 4 * states, 0

    def widths(self) -> dict[str, Width]:
        return {"linear_attention values": (self.values, "tp"), "linear_attention inputs": (sum(self.sections), "tp")}

    def layout_faults(self, layout: Any, key: str) -> Iterator[Fault]:
        """See `Block`. Context parallelism exchanges parts of a row for heads."""
        if self.key_heads % (layout.tp * layout.cp):
            yield Fault(
                f"{key}.layout.{'cp' if layout.cp > 1 else 'tp'}",
                f"tp {layout.tp} x cp {layout.cp} does not divide linear_num_key_heads {self.key_heads}: use divisors "
                f"of {self.key_heads}",
            )

    def rules(self, ours: str, theirs: str, names: Mapping[str, str]) -> Iterator[Rule]:
        """See `Block`. Names: `qkv`, `z`, `b` and `a`, or `qkvz` and `ba` with the rows of each key head together;
        `conv`, `dt_bias`, `A_log`, `norm`, `out`."""
        block = f"{ours}self_attention."
        stacked = self._by_key_head if "qkvz" in names else self._one_by_one
        rows = [Rows(f"{theirs}{names[name]}.weight", count, first) for name, count, first in stacked()]
        yield Rule(f"{block}in_proj.weight", tuple(rows))
        yield same(f"{block}conv1d.weight", f"{theirs}{names['conv']}.weight", sum(self.conv_sections))
        for name in ("dt_bias", "A_log"):
            yield same(f"{block}{name}", f"{theirs}{names[name]}", self.value_heads)
        yield same(f"{block}out_norm.weight", f"{theirs}{names['norm']}.weight", self.value_size)
        yield same(f"{block}out_proj.weight", f"{theirs}{names['out']}.weight", self.hidden)

    def _one_by_one(self) -> Iterator[tuple[str, int, int]]:
        """Yield (name, rows, first row) of the input projection's tensors."""
        *_, z, b, a = self.sections
        for name, count in zip(IN_PROJ, (sum(self.conv_sections), z, b, a), strict=True):
            yield name, count, 0

    def _by_key_head(self) -> Iterator[tuple[str, int, int]]:
        """Yield (name, rows, first row) where tensors have the rows of each key head together."""
        tensors = {"qkvz": self.sections[:4], "ba": self.sections[4:]}
        for name, sections in tensors.items():
            sizes = [rows // self.key_heads for rows in sections]
            for at, size in enumerate(sizes):
                for head in range(self.key_heads):
                    yield name, size, head * sum(sizes) + sum(sizes[:at])
