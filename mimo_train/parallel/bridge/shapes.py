"""Sizes of a step's messages: rows and load of every sample, the replica that holds it, and the text rows of every
microbatch. Every rank knows them before the step runs, so no message has to announce the size of the next one."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from data.order.step_plan import Span, StepPlan, balanced_parts, equal_parts, spread_parts
from mimo_train.layout.ranks import ModuleLayout
from mimo_train.layout.run import Run

Counts = dict[str, list[list[int]]]
"""{module: [microbatch][sample of the whole microbatch]}: a number."""


@dataclass(frozen=True)
class Needs:
    """The parts of an encoder module that need a gradient in a step; the same on every rank."""

    stages: tuple[bool, ...]
    """By pipeline stage: True if layers of this stage or of an earlier one are trained."""
    features: bool
    """True if the module's features need a gradient: any layer or the projector is trained."""


@dataclass
class StepShapes:
    """The sizes of every microbatch of the current step, by encoder module and by language-model replica. Samples are
    in the order of the step's plan."""

    counts: Counts = field(default_factory=dict)
    """Feature rows of each sample, by source."""
    loads: Counts = field(default_factory=dict)
    """Tokens of each sample inside the source's layers."""
    step: int = 0
    """Number of the step, so that bridges detect a new one."""
    needs: dict[str, Needs] = field(default_factory=dict)
    """Gradient needs of encoder modules; a missing module needs all gradients. Set at the start of a training step."""
    texts: list[list[tuple[int, int]]] = field(default_factory=list)
    """By microbatch and replica of the language model: (positions in a row of text, rows)."""
    _taken: list[list[Span]] = field(default_factory=list)
    _packed: bool = False
    _chosen: Sequence[int] = ()
    _step_loads: Counts = field(default_factory=dict)
    _spread: dict[str, list[list[Span]]] = field(default_factory=dict)

    def begin(self, counts: Counts, loads: Counts) -> None:
        """Start a step with these numbers, with equally many samples for each language-model replica."""
        self.counts, self.loads, self.texts, self._taken, self._packed = counts, loads, [], [], False
        self._spread = {}
        self.step += 1

    def follow(self, plan: StepPlan, counts: Counts, loads: Counts, chosen: Sequence[int]) -> None:
        """Start a step of the `chosen` microbatches of a plan. `counts` and `loads` are those of all its
        microbatches."""
        self.begin(
            {name: [rows[number] for number in chosen] for name, rows in counts.items()},
            {name: [rows[number] for number in chosen] for name, rows in loads.items()},
        )
        self.texts = [
            [(share.length, plan.rows(number, replica)) for replica, share in enumerate(plan.shares[number])]
            for number in chosen
        ]
        self._taken, self._packed = [plan.spans[number] for number in chosen], plan.packed
        self._chosen, self._step_loads = chosen, loads

    def destination_spans(self, source: str, destination: ModuleLayout, microbatch: int) -> list[Span]:
        """Return the samples [first, last) of a microbatch whose features each data-parallel rank of a destination
        needs."""
        if self._taken:
            return self._taken[microbatch]
        return equal_parts(len(self.counts[source][microbatch]), destination.dp)

    def features_need_gradient(self, name: str) -> bool:
        """True if the destination sends a gradient to this source."""
        return name not in self.needs or self.needs[name].features

    def stage_needs_gradient(self, name: str, stage: int) -> bool:
        """True if this stage of an encoder receives a gradient from the following one."""
        return name not in self.needs or self.needs[name].stages[stage]

    def spans(self, encoder: ModuleLayout, microbatch: int) -> list[Span]:
        """Return the samples [first, last) of a microbatch that each data-parallel rank of an encoder computes."""
        if self._packed:
            if encoder.name not in self._spread:
                self._spread[encoder.name] = spread_parts(self._step_loads[encoder.name], encoder.dp)
            return self._spread[encoder.name][self._chosen[microbatch]]
        if encoder.balance == "patches":
            return balanced_parts(self.loads[encoder.name][microbatch], encoder.dp)
        return equal_parts(len(self.counts[encoder.name][microbatch]), encoder.dp)


class Turns:
    """Counts the microbatches of a step in each direction, in order as in 1F1B. Restarts at every step."""

    def __init__(self, shapes: StepShapes):
        self._shapes, self._step = shapes, -1
        self._next: dict[int, int] = {}

    def next(self, direction: int) -> int:
        """Return the number of the next microbatch in a direction."""
        if self._step != self._shapes.step:
            self._step, self._next = self._shapes.step, {}
        microbatch = self._next.get(direction, 0)
        self._next[direction] = microbatch + 1
        return microbatch


@dataclass(frozen=True)
class Part:
    """Rows [first, last) of this rank's tensor that it exchanges with one peer."""

    peer: int
    first: int
    last: int


def parts_of(counts: Sequence[int], span: Span, others: Sequence[tuple[int, int, int]]) -> tuple[int, list[Part]]:
    """Return the rows of one microbatch on this rank, and the parts it shares with its peers.

    Args:
        counts: rows of every sample of the microbatch.
        span: this rank's samples, [first, last).
        others: (peer rank, first sample, last sample) of every peer.

    Returns:
        Number of rows of this rank's samples, and the non-empty parts in the order of `others`.
    """
    ends = [0, *accumulate(counts)]
    offset = ends[span[0]]
    parts = []
    for peer, first, last in others:
        first, last = max(first, span[0]), min(last, span[1])
        if first < last and ends[first] < ends[last]:
            parts.append(Part(peer, ends[first] - offset, ends[last] - offset))
    return ends[span[1]] - offset, parts


def features_width(run: Run, source: str, width: int) -> int:
    """Return the width of an encoder's feature rows: `width` for the language model's input, and for each deepstack
    layer."""
    return width * (1 + len(run.cfg.modules[source].encoder.deepstack))


def replica_ranks(module: ModuleLayout, stage: int) -> list[range]:
    """Return the ranks of each replica of a module's stage."""
    ranks, width = module.stage_ranks(stage), module.tp * module.cp
    return [ranks[replica * width : (replica + 1) * width] for replica in range(module.dp)]


def routes(sources: Sequence[range], destinations: Sequence[range]) -> list[tuple[int, int]]:
    """Return (sending rank, receiving rank) pairs, one per receiving rank and source replica. All ranks of a replica
    hold the same rows. A rank on both sides sends to itself. Otherwise the ranks of the source replica take turns."""
    return [
        (receiver if receiver in replica else replica[index % len(replica)], receiver)
        for receivers in destinations
        for index, receiver in enumerate(receivers)
        for replica in sources
    ]
