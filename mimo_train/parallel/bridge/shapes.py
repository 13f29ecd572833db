"""Rows and loads of every sample of a step, the replica that has it, and the rows of text of every microbatch. Every
rank has them before the step runs, so that no message has to announce the size of the next one. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from data.order.step_plan import Span, StepPlan, balanced_parts, equal_parts, spread_parts
from mimo_train.layout.ranks import ModuleLayout
from mimo_train.layout.run import Run

Counts = dict[str, list[list[int]]]
"""module -> microbatch -> sample of the whole microbatch -> number."""


@dataclass(frozen=True)
class Needs:
    """Which parts of an encoder module need a gradient in a step; the same on every rank."""

    stages: tuple[bool, ...]
    """By pipeline stage: whether layers of this stage or of an earlier one are trained."""
    features: bool
    """Whether the module's features need a gradient: any layer or the projector is trained."""


@dataclass
class StepShapes:
    """Rows of every sample of every microbatch of the current step, for each encoder module, and what the language
    model's replicas have of each microbatch. Samples are in the order of the step's plan."""

    counts: Counts = field(default_factory=dict)
    """Rows of features that a sample's media make, by source."""
    loads: Counts = field(default_factory=dict)
    """Tokens that a sample's media take inside the source's layers."""
    step: int = 0
    """Counts the steps, so that bridges detect a new one."""
    needs: dict[str, Needs] = field(default_factory=dict)
    """Which encoder modules need gradients; one that is missing does. Set at the start of a training step."""
    texts: list[list[tuple[int, int]]] = field(default_factory=list)
    """By microbatch and replica of the language model: (positions of a row of text, rows)."""
    _taken: list[list[Span]] = field(default_factory=list)
    _packed: bool = False
    _chosen: Sequence[int] = ()
    _step_loads: Counts = field(default_factory=dict)
    _spread: dict[str, list[list[Span]]] = field(default_factory=dict)

    def begin(self, counts: Counts, loads: Counts) -> None:
        """Start a step with these numbers, of equal numbers of samples for each replica of the language model."""
        self.counts, self.loads, self.texts, self._taken, self._packed = counts, loads, [], [], False
        self._spread = {}
        self.step += 1

    def follow(self, plan: StepPlan, counts: Counts, loads: Counts, chosen: Sequence[int]) -> None:
        """Start a step of the `chosen` microbatches of a plan.

        Args:
            counts, loads: of all its microbatches.
        """
        self.begin(*({name: [of[at] for at in chosen] for name, of in numbers.items()} for numbers in (counts, loads)))
        self.texts = [
            [(share.length, plan.rows(at, replica)) for replica, share in enumerate(plan.shares[at])] for at in chosen
        ]
        self._taken, self._packed = [plan.spans(at) for at in chosen], plan.packed
        self._chosen, self._step_loads = chosen, loads

    def taken(self, source: str, destination: ModuleLayout, microbatch: int) -> list[Span]:
        """Samples of a microbatch whose features each data-parallel rank of a destination needs."""
        return (
            self._taken[microbatch]
            if self._taken
            else equal_parts(len(self.counts[source][microbatch]), destination.dp)
        )

    def features_need_gradient(self, name: str) -> bool:
        """Whether the destination sends a gradient to this source."""
        return name not in self.needs or self.needs[name].features

    def stage_needs_gradient(self, name: str, stage: int) -> bool:
        """Whether this stage of an encoder receives a gradient from the following one."""
        return name not in self.needs or self.needs[name].stages[stage]

    def spans(self, encoder: ModuleLayout, microbatch: int) -> list[Span]:
        """Samples of a microbatch that each data-parallel rank of an encoder computes."""
        if self._packed:
            if encoder.name not in self._spread:
                self._spread[encoder.name] = spread_parts(self._step_loads[encoder.name], encoder.dp)
            return self._spread[encoder.name][self._chosen[microbatch]]
        if encoder.balance == "patches":
            return balanced_parts(self.loads[encoder.name][microbatch], encoder.dp)
        return equal_parts(len(self.counts[encoder.name][microbatch]), encoder.dp)


class Turns:
    """Which microbatch is next, forward and backward: each in order, as in 1F1B, and from the first at every step."""

    def __init__(self, shapes: StepShapes):
        self._shapes = shapes
        self._step, self._forward, self._backward = -1, 0, 0

    def forward(self) -> int:
        """Number of the microbatch that goes forward next."""
        self._restart_if_new_step()
        self._forward += 1
        return self._forward - 1

    def backward(self) -> int:
        """Number of the microbatch that goes backward next."""
        self._restart_if_new_step()
        self._backward += 1
        return self._backward - 1

    def _restart_if_new_step(self) -> None:
        if self._step != self._shapes.step:
            self._step, self._forward, self._backward = self._shapes.step, 0, 0


@dataclass(frozen=True)
class Part:
    """Rows [first, last) of this rank's tensor that it exchanges with one peer."""

    peer: int
    first: int
    last: int


def parts_of(counts: Sequence[int], own: Span, others: Sequence[tuple[int, int, int]]) -> tuple[int, list[Part]]:
    """Rows this rank holds of one microbatch, and the parts it shares with its peers.

    Args:
        counts: rows of every sample of the microbatch.
        own: this rank's samples, [first, last).
        others: (peer rank, first sample, last sample) of every peer.

    Returns:
        Number of rows of the own samples, and the non-empty parts in the order of `others`.
    """
    ends = [0, *accumulate(counts)]
    offset = ends[own[0]]
    parts = []
    for peer, first, last in others:
        first, last = max(first, own[0]), min(last, own[1])
        if first < last and ends[first] < ends[last]:
            parts.append(Part(peer, ends[first] - offset, ends[last] - offset))
    return ends[own[1]] - offset, parts


def features_width(run: Run, source: str, width: int) -> int:
    """Numbers in a row of an encoder's features: those for the input of the language model, which is `width` wide, and
    those for its layers."""
    return width * (1 + len(run.cfg.modules[source].encoder.deepstack))


def giving_replicas(module: ModuleLayout) -> list[range]:
    """Ranks of each replica of a module's last stage, which has its features."""
    return _replicas(module, module.pp - 1)


def taking_replicas(module: ModuleLayout) -> list[range]:
    """Ranks of each replica of a module's first stage, which takes the features of others."""
    return _replicas(module, 0)


def _replicas(module: ModuleLayout, stage: int) -> list[range]:
    ranks, width = module.stage_ranks(stage), module.tp * module.cp
    return [ranks[replica * width : (replica + 1) * width] for replica in range(module.dp)]


def routes(sources: Sequence[range], destinations: Sequence[range]) -> list[tuple[int, int]]:
    """(giving rank, taking rank) pairs: every taking rank has one giving rank in every replica of the source.

    All ranks of a replica hold the same rows. A rank on both sides gives to itself; otherwise the ranks of the giving
    replica take turns.
    """
    return [
        (taking if taking in replica else replica[index % len(replica)], taking)
        for taking_replica in destinations
        for index, taking in enumerate(taking_replica)
        for replica in sources
    ]
