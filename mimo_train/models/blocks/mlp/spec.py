"""The sizes of a feed-forward block, and what depends on them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from encoders.key_rules import MOST_WIDTH
from encoders.weight_map import Rule, same, stacked, with_biases
from mimo_train.config.errors import Fault
from mimo_train.config.keys import key
from mimo_train.models.blocks.base import Block, LayerKeys, Linear, Matmul, Share, Width, tp_faults

GATED = ("swiglu", "geglu", "quick_geglu")
"""Gated activations."""


@dataclass
class MlpKeys(LayerKeys):
    """Keys of the feed-forward block."""

    ffn_hidden_size: int = key(3072, at_least=1, at_most=MOST_WIDTH)
    """Width of the feed-forward block; with a gate, of each half."""
    activation: str = key("swiglu", choices=(*GATED, "gelu", "silu"))
    """Gated: `swiglu`, `geglu` (tanh form of GELU), `quick_geglu` (x sigmoid(1.702 x)). Not gated: `gelu`, `silu`."""
    activation_clamp: float = key(0.0, at_least=0, zero_means="no bounds")
    """Gated: largest input of the gate, and largest magnitude of what it multiplies; 0: no bounds."""
    glu_offset: float = key(0.0, at_least=-1e6, at_most=1e6)
    """Gated: added to what the gate multiplies."""

    @property
    def is_gated(self) -> bool:
        """True if the feed-forward block is gated."""
        return self.activation in GATED

    def mlp_faults(self, prefix: str) -> Iterator[Fault]:
        """Yield invalid combinations of keys; `prefix`: key of the spec."""
        for name in ("activation_clamp", "glu_offset"):
            if getattr(self, name) and not self.is_gated:
                yield Fault(f"{prefix}.{name}", f"requires a gated activation, is {self.activation}. Remove it")

    def mlp(self) -> "Mlp":
        """Return the block of a dense layer."""
        return Mlp(self.hidden_size, self.ffn_hidden_size, self.is_gated, self.bias, self.activation_clamp > 0)


@dataclass(frozen=True)
class Mlp(Block):
    """Two linear layers, the first with a gate next to it if the block is gated."""

    kind = "mlp"

    hidden: int
    width: int
    gated: bool
    bias: bool = False
    clamped: bool = False

    @property
    def up(self) -> int:
        """Outputs of the first linear layer."""
        return (2 if self.gated else 1) * self.width

    def parameters(self) -> tuple[int, int]:
        split, replicated = (self.up, self.hidden) if self.bias else (0, 0)
        return self.matrices(1, 1, 1) + split, replicated

    def matrices(self, tp: int, ep: int, etp: int) -> int:
        return self.hidden * ((3 if self.gated else 2) * self.width // tp)

    def matmuls(self, layer: str, tokens: float, pairs: float | None = None) -> Iterator[Matmul]:
        yield from self.two_matmuls(f"{layer}.mlp", tokens)

    def two_matmuls(self, prefix: str, rows: float) -> Iterator[Matmul]:
        """Yield the matmuls of `rows` through the two linear layers under `prefix`."""
        yield Matmul(f"{prefix}.linear_fc1.weight", 2 * rows * self.hidden * self.up, in_layer=True)
        yield Matmul(f"{prefix}.linear_fc2.weight", 2 * rows * self.width * self.hidden, in_layer=True)

    def linears(self, layer: str, number: int) -> Iterator[Linear]:
        up = (("gate_proj", self.width), ("up_proj", self.width)) if self.gated else (("up_proj", self.width),)
        down = (("down_proj", self.hidden),)
        yield Linear(f"{layer}.mlp.linear_fc1", self.hidden, up, layer=number)
        yield Linear(f"{layer}.mlp.linear_fc2", self.width, down, column=False, layer=number)

    def kept(self, share: Share) -> tuple[int, int]:
        """Return the input and output of the activation function (2 f; 5 f if gated without a fused kernel, 3 f with
        it; 4 f in a plain layer, which splits a gated matmul without a copy; 2 f more for clamped halves)."""
        gated = 3 if share.fused else 4 if share.plain else 5
        numbers = (gated if self.gated else 2) * self.width - (self.width if share.frozen else 0)
        numbers += 2 * self.width if self.clamped else 0
        return numbers * share.size, 0

    def work(self, share: Share) -> int:
        """Return the larger of two: the gradient before the activation function (f; 2 f if gated), or, once the
        activations are freed, of its first weight (h f / t; twice if gated)."""
        function = share.tokens * (self.up // share.tp) * share.size
        if share.frozen:
            return function
        freed = share.tokens * self.width // share.tp * (3 if self.gated else 1)
        return max(function, self.up // share.tp * self.hidden * share.size - freed * share.size)

    def widths(self) -> dict[str, Width]:
        return {"ffn_hidden_size": (self.width, "tp")}

    def layout_faults(self, layout: Any, key: str) -> Iterator[Fault]:
        yield from tp_faults(layout.tp, key, ffn_hidden_size=self.width)

    def rules(self, ours: str, theirs: str, names: Mapping[str, str]) -> Iterator[Rule]:
        """See `Block`. Names: `gate`, `up` and `down`; `fused`: one tensor of gate and up instead of two."""
        linears = self.linear_rules(f"{ours}mlp.", theirs, names)
        yield from with_biases(linears) if self.bias else linears

    def linear_rules(self, ours: str, theirs: str, names: Mapping[str, str]) -> Iterator[Rule]:
        """Yield the rules of the two weights under the prefix `ours`."""
        halves = ("gate", "up") if self.gated else ("up",)
        first = [(f"{theirs}{names[half]}.weight", self.width) for half in halves if half in names]
        first = first or [(f"{theirs}{names['fused']}.weight", self.up)]
        yield stacked(f"{ours}linear_fc1.weight", first)
        yield same(f"{ours}linear_fc2.weight", f"{theirs}{names['down']}.weight", self.hidden)
