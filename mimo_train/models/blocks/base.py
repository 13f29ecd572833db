"""The interface of a block, and a layer as the sum of its blocks.

Bytes of activations follow Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"
(arXiv 2205.05198), for attention that does not store the s x s scores. *Kept* bytes wait for the backward pass. *Work*
is the rest at the peak: gradients of activations, gathered inputs, and the gradient of one weight.

Symbols: s tokens of one sample, b samples of one microbatch on one rank, h hidden size, f feed-forward width, k width
of all key heads, t tensor parallel size, e bytes of one activation (4 in fp32, 2 in half precision).
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from encoders.key_rules import MOST_LAYERS, MOST_WIDTH
from encoders.weight_map import Rule
from mimo_train.config.errors import Fault
from mimo_train.config.keys import Section, key

WHOLE = ""
"""Stands for a whole linear layer instead of a projection's name."""


EXPERT = re.compile(r"local_experts\.\d+\.")
"""The part of a name that an expert's layer has, and its `Linear` lacks."""


@dataclass
class LayerKeys(Section):
    """Keys that all blocks of a layer share."""

    name: str = "gpt"
    """Free name, shown in tables."""
    num_layers: int = key(12, at_least=1, at_most=MOST_LAYERS)
    """Transformer layers over all pipeline stages."""
    hidden_size: int = key(768, at_least=1, at_most=MOST_WIDTH)
    """Width of the residual stream."""
    normalization: str = key("RMSNorm", choices=("RMSNorm", "LayerNorm"))
    """`RMSNorm` or `LayerNorm`."""
    layernorm_epsilon: float = key(1e-5, above=0, below=1)
    """Epsilon of every norm."""
    norm_bias: bool = True
    """Norms of `LayerNorm` have biases."""
    zero_centered_norms: bool = False
    """Norms multiply by 1 + weight, head norms too. `RMSNorm` only."""
    pre_norms: bool = True
    """Normalise the inputs of attention and feed-forward block."""
    post_norms: bool = False
    """Normalise the outputs of attention and feed-forward block."""
    parallel_block: bool = False
    """Attention and feed-forward block read the same norm."""
    residual_multiplier: float = key(1.0, above=0)
    """Multiply the outputs of attention and feed-forward block."""
    bias: bool = False
    """Linear layers have biases, those of experts and routers too."""
    dropout: float = key(0.0, at_least=0, below=1)
    """Dropout probability of hidden states and attention."""
    init_std: float = key(0.02, at_least=0, at_most=1000)
    """Standard deviation of the initial weights."""

    @property
    def norm_vectors(self) -> int:
        """Number of vectors of parameters of a norm."""
        return 2 if self.normalization == "LayerNorm" and self.norm_bias else 1

    @property
    def torch_norms(self) -> str:
        """Key of norms that Transformer Engine does not have; empty: none."""
        if self.normalization == "LayerNorm" and not self.norm_bias:
            return "norm_bias=false"
        return "parallel_block" if self.parallel_block else "" if self.pre_norms else "pre_norms=false"


@dataclass(frozen=True)
class Matmul:
    """The computation with one weight matrix."""

    name: str
    """Name of the parameter inside its module, which patterns of `freeze` match."""
    forward: float = 0.0
    """Forward FLOPs with this weight; 0 for a look-up."""
    attention: float = 0.0
    """Forward FLOPs of the core attention that follows."""
    in_layer: bool = False
    """True in transformer layers, which full recompute runs again."""
    input_gradient: bool = True
    """True if backward always computes the gradient of its input, as in Megatron-Core's linear layers, not torch's."""


@dataclass(frozen=True)
class Linear:
    """A linear layer that can have adapters, with the sizes of the unsharded model. The rows of its weight are `groups`
    blocks, each with the rows of every projection: queries, key and value of one key head; or gate and up once."""

    name: str
    """Name inside the module; the weight is `NAME.weight`."""
    inputs: int
    projections: tuple[tuple[str, int], ...]
    """(name, rows in a group). A layer with one projection can only have adapters as a whole."""
    groups: int = 1
    cut_groups: bool = False
    """True if tensor parallelism splits the groups instead of each projection."""
    sections: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """(projection, rows of its sections): of projections of several sections, each of which tensor parallelism splits;
    without `cut_groups`."""
    column: bool = True
    """True if tensor parallelism splits the rows (column-parallel), False for the inputs (row-parallel)."""
    layer: int | None = None
    """Index of the transformer layer; None for the projector."""
    experts: int = 0
    """Number of experts that each have this layer, with adapters of their own; 0: it belongs to no expert."""

    def rows(self, projection: str = WHOLE) -> int:
        """Return the number of rows of the weight, or of one projection."""
        return self.groups * sum(rows for name, rows in self.projections if projection in (WHOLE, name))

    def sections_of(self, projection: str = WHOLE) -> tuple[int, ...]:
        """Return the rows of the sections of the weight, or of one projection. Tensor parallelism splits each."""
        if self.cut_groups:
            return (self.rows(projection),)
        several, wanted = dict(self.sections), [each for each in self.projections if projection in (WHOLE, each[0])]
        return tuple(size for name, rows in wanted for size in several.get(name, (rows,)))

    def of_expert(self, number: int) -> str:
        """Return the name of the layer of one expert; `name` if it belongs to none."""
        path, _, last = self.name.rpartition(".")
        return f"{path}.local_experts.{number}.{last}" if self.experts else self.name

    @property
    def fused(self) -> bool:
        """True if there is more than one projection."""
        return len(self.projections) > 1

    def names(self) -> dict[str, str]:
        """Return the names that a pattern can match, the layer first: name -> projection."""
        path, _, last = self.name.rpartition(".")
        names = {f"{path}.{name}": name if self.fused else WHOLE for name, _ in self.projections if name != last}
        return {self.name: WHOLE} | names


@dataclass(frozen=True)
class Share:
    """The part of a layer that one rank computes in one microbatch."""

    tokens: int
    """Tokens s * b on this rank, before sequence parallelism divides them."""
    size: int
    """Bytes of one activation."""
    tp: int = 1
    sp: bool = False
    cp: int = 1
    """Ranks whose keys and values are gathered, and kept instead of this rank's own."""
    etp: int = 1
    frozen: bool = False
    """True if the linear layers are not trained, and need no inputs."""
    plain: bool = False
    """True for a layer of `mimo_train.models.dense_layer`."""
    fused: bool = False
    """True if one kernel computes bias and activation function, and keeps its input alone."""
    whole_rows: bool = False
    """True if one kernel takes the documents of packed rows, or attention has a mask."""

    @property
    def local_tokens(self) -> int:
        """Tokens outside of the linear layers."""
        return self.tokens // (self.tp if self.sp else 1)


Width = tuple[int, str]
"""A width of a matmul, and the axis that divides it: `tp`, `etp` or none."""


class Block(ABC):
    """The sizes of a piece of a layer, of the unsharded model. Subclasses are frozen dataclasses."""

    kind: ClassVar[str]
    """Name of its folder, and of its tensors' names in a family."""

    @abstractmethod
    def parameters(self) -> tuple[int, int]:
        """Return the numbers of parameters that tensor parallelism divides, and that every rank has. Without
        experts."""

    def expert_parameters(self, ep: int, etp: int) -> int:
        """Return the parameters of experts on one rank."""
        return 0

    @abstractmethod
    def matrices(self, tp: int, ep: int, etp: int) -> int:
        """Return the weights of the linear layers on one rank, which may be in fp8."""

    @abstractmethod
    def matmuls(self, layer: str, tokens: float, pairs: float | None = None) -> Iterator[Matmul]:
        """Yield the matmuls of a row of `tokens`.

        Args:
            layer: the layer's name in its module.
            pairs: pairs of tokens that attend to each other; None: those of one causal row.
        """

    @abstractmethod
    def linears(self, layer: str, number: int) -> Iterator[Linear]:
        """Yield the linear layers that can have adapters; `number`: of the layer."""

    @abstractmethod
    def kept(self, share: Share) -> tuple[int, int]:
        """Return the bytes kept for backward: those of each token that tensor parallelism divides, and others."""

    def work(self, share: Share) -> int:
        """Return the work in bytes at the peak of the backward pass."""
        return 0

    def scores(self, sequence: int, samples: int, tp: int, cp: int) -> int:
        """Return the bytes of attention scores that are kept unless they are computed again."""
        return 0

    @abstractmethod
    def widths(self) -> dict[str, Width]:
        """Return the widths of its matmuls by their keys, next to the hidden size."""

    def needs_torch(self, cp: int) -> str:
        """Return why it is built of torch's layers even if Transformer Engine is installed, a sentence that begins with
        a key of the module; empty: it is not."""
        return ""

    @abstractmethod
    def layout_faults(self, layout: Any, key: str) -> Iterator[Fault]:
        """Yield faults of a module's `LayoutConfig`; `key`: of the module."""

    @abstractmethod
    def rules(self, ours: str, theirs: str, names: Mapping[str, str]) -> Iterator[Rule]:
        """Yield the rules of its parameters.

        Args:
            ours: prefix of the layer in the module.
            theirs: prefix of the layer in a directory.
            names: names of the family's tensors behind `theirs`.
        """


@dataclass(frozen=True)
class Layer:
    """A transformer layer: what mixes tokens, and the feed-forward block, and their norms."""

    hidden: int
    mixer: Block
    feed_forward: Block
    norm_vectors: int = 1
    """Vectors of parameters of a norm."""
    pre_norms: int = 2
    """Norms in front of the blocks: one of each, one of both, or none."""
    post_norms: bool = False
    """True with a norm behind each block."""
    scaled: bool = False
    """True if learned scales multiply the outputs of the blocks."""
    dropout: bool = False

    @property
    def blocks(self) -> tuple[Block, Block]:
        """Both blocks, in order."""
        return self.mixer, self.feed_forward

    def parameters(self, tp: int = 1) -> int:
        """Return the parameters on one rank, without experts. Norms are on every rank."""
        split, replicated = (sum(counts) for counts in zip(*(block.parameters() for block in self.blocks), strict=True))
        norms = (self.pre_norms + 2 * self.post_norms) * self.hidden * self.norm_vectors
        return split // tp + replicated + norms

    def matmuls(self, layer: str, tokens: float, pairs: float | None = None) -> Iterator[Matmul]:
        """Yield the matmuls of a row of `tokens`. Arguments as in `Block.matmuls`."""
        for block in self.blocks:
            yield from block.matmuls(layer, tokens, pairs)

    def kept(self, share: Share, recomputed: tuple[str, ...] = ()) -> int:
        """Return the bytes that the layer keeps for backward; `recomputed`: parts of `train.recompute`.

        In full on each tensor-parallel rank: the inputs of the two norms and of the linear layers behind them (4 h),
        the inputs of the learned scales of the two branches (2 h, if any), and their dropout masks (1 byte each per h).
        Norms behind the blocks keep their inputs (2 h in full); without norms in front, linear layers share their input
        with the residual stream (2 h less), behind one norm for both with each other (the same). The rest is the
        blocks', divided by t. Sequence parallel divides the first part too. With f = 4 h, k = h, dropout, bf16, no gate
        and no rotation this is the paper's s b h (10 + 24 / t), without its 5 a s / (h t) of stored attention scores;
        with sequence parallel 34 s b h / t. Recomputed blocks keep only their inputs, and recomputed norms theirs.
        """
        inputs = (2 if self.post_norms else 0) + (2 if self.scaled else 0)
        inputs += self.pre_norms if share.frozen or "norms" in recomputed else 2 * max(self.pre_norms, 1)
        replicated = inputs * self.hidden * share.size + (2 * self.hidden if self.dropout else 0)
        blocks = [block.kept(share) for block in self._blocks(recomputed, False)]
        split, others = (sum(counts) for counts in zip((0, 0), *blocks, strict=True))
        tokens, tp = share.tokens, share.tp
        kept = tokens * (replicated + split) // tp if share.sp else tokens * replicated + tokens * split // tp
        return kept + others

    def _blocks(self, recomputed: tuple[str, ...], chosen: bool) -> list[Block]:
        """Return the blocks that are recomputed, or those that are not."""
        parts = {"attention": self.mixer, self.feed_forward.kind: self.feed_forward}
        return [block for part, block in parts.items() if (part in recomputed) is chosen]

    def work(self, share: Share, recomputed: tuple[str, ...] = ()) -> int:
        """Return the work in bytes of the backward pass, at the feed-forward block: the gradients of output and
        residual (2 h), what sequence parallel gathers of one input (h), the block's own, the output of a recomputed
        norm (h), and the largest block that is recomputed."""
        ends = (3 if "norms" in recomputed else 2) * share.local_tokens * self.hidden * share.size
        gathered = share.tokens * self.hidden * share.size if share.sp else 0
        kept = [block.kept(share) for block in self._blocks(recomputed, True)]
        again = max((share.tokens * split // share.tp + others for split, others in kept), default=0)
        return ends + gathered + self.feed_forward.work(share) + again


def tp_faults(tp: int, key: str, **sizes: int) -> Iterator[Fault]:
    """Yield faults of sizes that `tp` does not divide; `key`: of the module."""
    for name, size in sizes.items():
        if size % tp:
            yield Fault(
                f"{key}.layout.tp",
                f"tp {tp} does not divide {name} {size}: use a divisor of {size}, or change {name}",
            )
