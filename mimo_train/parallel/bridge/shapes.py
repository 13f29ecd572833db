"""Sizes of a step's messages: the routes of media items, and the text rows of every microbatch. Every rank knows them
before the step runs, so no message has to announce the size of the next one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from data.order.load_balance import MediaItems, Routes, item_per_sample, routes_of
from data.order.step import StepBatch
from data.order.step_plan import StepPlan, plan_in_order
from mimo_train.layout.ranks import ModuleLayout
from mimo_train.layout.run import Run


@dataclass(frozen=True)
class Needs:
    """The parts of an encoder module that need a gradient in a step; the same on every rank."""

    stages: tuple[bool, ...]
    """By pipeline stage: True if layers of this stage or of an earlier one are trained."""
    features: bool
    """True if the module's features need a gradient: any layer or the projector is trained."""


@dataclass
class StepShapes:
    """The sizes of every microbatch of the current step."""

    step: int = 0
    """Number of the step, so that bridges detect a new one."""
    needs: dict[str, Needs] = field(default_factory=dict)
    """Gradient needs of encoder modules; a missing module needs all gradients. Set at the start of a training step."""
    texts: list[list[tuple[int, int]]] = field(default_factory=list)
    """By microbatch and replica of the language model: (positions in a row of text, rows)."""
    _plan: StepPlan | None = None
    _media: dict[str, MediaItems] = field(default_factory=dict)
    _chosen: Sequence[int] = ()
    _routes: dict[str, list[Routes]] = field(default_factory=dict)

    def begin(self, rows: Mapping[str, Sequence[int]]) -> None:
        """Start a step of one microbatch on one data-parallel rank. `rows`: rows of features of each sample, by encoder
        module."""
        samples = max(map(len, rows.values()), default=1)
        self._start(
            plan_in_order(0, samples, samples, 1, 0),
            {name: item_per_sample(np.array(of_samples, dtype=np.int64)) for name, of_samples in rows.items()},
            (0,),
        )
        self.texts = []

    def follow(self, step: StepBatch, chosen: Sequence[int] | None = None) -> None:
        """Start a step of the `chosen` microbatches of a batch; None: all."""
        plan = step.plan
        chosen = range(len(plan.shares)) if chosen is None else chosen
        self._start(plan, step.media, chosen)
        self.texts = [
            [(share.length, plan.rows(number, replica)) for replica, share in enumerate(plan.shares[number])]
            for number in chosen
        ]

    def _start(self, plan: StepPlan, media: dict[str, MediaItems], chosen: Sequence[int]) -> None:
        self._plan, self._media, self._chosen, self._routes = plan, media, chosen, {}
        self.step += 1

    def routes(self, encoder: ModuleLayout, microbatch: int) -> Routes:
        """Return the routes of an encoder's media items in a microbatch."""
        if encoder.name not in self._routes:
            assert self._plan is not None, "no step was started"
            how = encoder.dp, encoder.balance == "images", encoder.pass_microbatches
            self._routes[encoder.name] = routes_of(self._media[encoder.name], self._plan, *how)
        return self._routes[encoder.name][self._chosen[microbatch]]

    def features_need_gradient(self, name: str) -> bool:
        """True if the destination sends a gradient to this source."""
        return name not in self.needs or self.needs[name].features

    def stage_needs_gradient(self, name: str, stage: int) -> bool:
        """True if this stage of an encoder receives a gradient from the following one."""
        return name not in self.needs or self.needs[name].stages[stage]


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


def parts_of(rows: Sequence[int], peers: Sequence[tuple[int, int]]) -> list[Part]:
    """Return the parts that this rank exchanges with its peers, without empty ones.

    Args:
        rows: rows for each data-parallel rank on the other side, which follow each other in this rank's tensor.
        peers: (rank, its data-parallel rank).
    """
    ends = [0, *accumulate(rows)]
    return [Part(peer, ends[replica], ends[replica + 1]) for peer, replica in peers if rows[replica]]


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
