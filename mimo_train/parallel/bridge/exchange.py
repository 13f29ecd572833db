"""Bridges send features from the source's last stage to the destination's first stage, and gradients back.

Megatron-Core 0.19.2's `BridgeCommunicator` exchanges shapes before every transfer (bridge_communicator.py:864-980) and
reduces once per debug message (:428, 434, 512, ...). It requires data-parallel sizes that divide each other and no
context parallelism (:105-116), and cannot return gradients of unequal parts to several encoder replicas
(mimo/model/base.py:528-558). Its `ColocatedBridgeCommunicator` requires equal counts in every sample, one stage and no
context parallelism (colocated_communicator.py:47-50, 118-154). The bridges here know the number of rows of every sample
from the data index. They support any data-parallel sizes and any counts, with one batch of sends and receives per
transfer.

Rows are the features of one microbatch, [rows, hidden], in sample order. Every rank of a replica holds all rows of the
replica's samples.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.hyper_comm_grid import HyperCommGrid

from data.order.step_plan import Span
from mimo_train.flight.file_format import BACKWARD, FORWARD
from mimo_train.flight.recorder import RECORDER
from mimo_train.layout.placement import Edge
from mimo_train.layout.run import Run
from mimo_train.parallel.bridge.shapes import (
    Part,
    StepShapes,
    Turns,
    giving_replicas,
    parts_of,
    routes,
    taking_replicas,
)

Watch = Callable[[str], AbstractContextManager]
"""A function that times a `with` block by name (see `mimo_train.logging.stopwatch`)."""


def not_timed(name: str) -> AbstractContextManager:
    """Measure nothing."""
    return nullcontext()


class Bridge:
    """The routes of feature rows along one edge, and the exchange itself.

    Args:
        edge: source and destination module.
        shapes: rows of every sample of the current step.
        hidden_size: width of a row, which is the destination's.
        group: the ranks of this edge; None on a rank that neither sends nor receives.
        watch: times the exchange as `bridge_wait`.

    Attributes:
        while_waiting: called in every exchange after all messages are posted.
    """

    def __init__(
        self,
        edge: Edge,
        run: Run,
        shapes: StepShapes,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup | None,
        watch: Watch = not_timed,
    ):
        self._group = group
        self.source, self._shapes, self._watch = run.layout.modules[edge.source], shapes, watch
        self._hidden, self._dtype, self._device = hidden_size, dtype, device
        self._name = f"{edge.source}->{edge.destination}"
        self._rank = rank = dist.get_rank()
        self.destination = run.layout.modules[edge.destination]
        giving, taking = giving_replicas(self.source), taking_replicas(self.destination)
        self._source_replica, self._destination_replica = _replica_of(giving), _replica_of(taking)
        forward, backward = routes(giving, taking), routes(taking, giving)
        self._forward_to = [to for sender, to in forward if sender == rank]
        self._forward_from = [sender for sender, to in forward if to == rank]
        self._backward_to = [to for sender, to in backward if sender == rank]
        self._backward_from = [sender for sender, to in backward if to == rank]
        self._turns = Turns(shapes)
        self.while_waiting: Callable[[], None] | None = None

    def _give_forward(self, features: torch.Tensor, microbatch: int) -> list[tuple[torch.Tensor, Part]]:
        RECORDER.at(self._name, FORWARD, microbatch)
        peers = self._spans_of_destination(self._forward_to, microbatch)
        return self._give(features, self._source_span(microbatch), peers, microbatch)

    def _take_forward(self, microbatch: int) -> tuple[torch.Tensor, list[Part]]:
        RECORDER.at(self._name, FORWARD, microbatch)
        peers = self._spans_of_source(self._forward_from, microbatch)
        return self._take(self._destination_span(microbatch), peers, microbatch)

    def _give_backward(self, gradient: torch.Tensor | None, microbatch: int) -> list[tuple[torch.Tensor, Part]]:
        RECORDER.at(self._name, BACKWARD, microbatch)
        peers = self._spans_of_source(self._backward_to, microbatch)
        return self._give(gradient, self._destination_span(microbatch), peers, microbatch)

    def _take_backward(self, microbatch: int) -> tuple[torch.Tensor, list[Part]]:
        RECORDER.at(self._name, BACKWARD, microbatch)
        peers = self._spans_of_destination(self._backward_from, microbatch)
        return self._take(self._source_span(microbatch), peers, microbatch)

    def _give(
        self, rows: torch.Tensor | None, own: Span, peers: Sequence[tuple[int, int, int]], microbatch: int
    ) -> list[tuple[torch.Tensor, Part]]:
        count, parts = parts_of(self._counts(microbatch), own, peers)
        if not parts:
            return []
        if rows is None:
            # Nothing in the destination depends on these features.
            rows = torch.zeros(count, self._hidden, dtype=self._dtype, device=self._device)
        assert rows.shape == (count, self._hidden), (
            f"{self.source.name}: features are {tuple(rows.shape)}, the data index says {(count, self._hidden)}"
        )
        rows = rows.detach().to(self._dtype).contiguous()
        return [(rows[part.first : part.last], part) for part in parts]

    def _take(
        self, own: Span, peers: Sequence[tuple[int, int, int]], microbatch: int
    ) -> tuple[torch.Tensor, list[Part]]:
        count, parts = parts_of(self._counts(microbatch), own, peers)
        return torch.empty(count, self._hidden, dtype=self._dtype, device=self._device), parts

    def _exchange(
        self, given: list[tuple[torch.Tensor, Part]], taken: torch.Tensor | None = None, parts: Sequence[Part] = ()
    ) -> None:
        """Send the parts in `given` and fill `taken`, in one batch. Copy the parts that stay on this rank."""
        operations = [
            dist.P2POp(dist.isend, rows, part.peer, self._group) for rows, part in given if part.peer != self._rank
        ]
        own = next((rows for rows, part in given if part.peer == self._rank), None)
        for part in parts:
            assert taken is not None, "there are parts, and no room for them"
            room = taken[part.first : part.last]
            if part.peer == self._rank:
                assert own is not None, f"rank {self._rank} takes from itself what it does not give"
                room.copy_(own)
            else:
                operations.append(dist.P2POp(dist.irecv, room, part.peer, self._group))
        works = dist.batch_isend_irecv(operations) if operations else ()
        if self.while_waiting:
            # Called even if this rank exchanges nothing: the function may be collective over a replica's ranks.
            self.while_waiting()
        if works:
            with self._watch("bridge_wait"):
                for work in works:
                    work.wait()

    def _counts(self, microbatch: int) -> list[int]:
        return self._shapes.counts[self.source.name][microbatch]

    def _source_span(self, microbatch: int) -> Span:
        return self._shapes.spans(self.source, microbatch)[self._source_replica[self._rank]]

    def _destination_span(self, microbatch: int) -> Span:
        return self._taken(microbatch)[self._destination_replica[self._rank]]

    def _spans_of_source(self, ranks: Sequence[int], microbatch: int) -> list[tuple[int, int, int]]:
        spans = self._shapes.spans(self.source, microbatch)
        return [(rank, *spans[self._source_replica[rank]]) for rank in ranks]

    def _spans_of_destination(self, ranks: Sequence[int], microbatch: int) -> list[tuple[int, int, int]]:
        spans = self._taken(microbatch)
        return [(rank, *spans[self._destination_replica[rank]]) for rank in ranks]

    def _taken(self, microbatch: int) -> list[Span]:
        return self._shapes.taken(self.source.name, self.destination, microbatch)


class DisjointBridge(Bridge):
    """An edge between modules on different ranks, whose messages are sent between the steps of a pipeline schedule.

    Has the methods that `MultiModulePipelineCommunicator` calls on a `BridgeCommunicator`. If nothing in the source
    needs a gradient, none is sent. The received features still require one, because the schedule retains the gradients
    of all inputs (schedules.py:619 in Megatron-Core 0.19.2).
    """

    def __init__(self, edge: Edge, grids: dict[str, HyperCommGrid], *arguments: Any):
        """`arguments`: the arguments of `Bridge` after the edge."""
        super().__init__(edge, *arguments)
        self.src_module_name, self.dest_module_name = edge.source, edge.destination
        self.src_grid, self.dest_grid = grids[edge.source], grids[edge.destination]

    def is_current_rank_in_grid(self, grid: HyperCommGrid) -> bool:
        """True if this rank belongs to `grid`."""
        return grid.is_current_rank_in_grid()

    def send_forward(self, features: torch.Tensor) -> None:
        """Send this rank's features [rows, hidden] of the next microbatch."""
        self._exchange(self._give_forward(features, self._turns.forward()))

    def recv_forward(self) -> torch.Tensor:
        """Receive the features of this rank's samples of the next microbatch, [rows, hidden], ready for autograd."""
        features, parts = self._take_forward(self._turns.forward())
        self._exchange([], features, parts)
        return features.requires_grad_()

    def send_backward(self, gradient: torch.Tensor | None) -> None:
        """Send the gradient of the oldest received features without one; None means zeros."""
        self._exchange(self._next_given_backward(gradient))

    def recv_backward(self) -> torch.Tensor | None:
        """Receive the gradient [rows, hidden] of the oldest sent features without one."""
        gradient, parts = self._next_taken_backward()
        self._exchange([], gradient, parts)
        return gradient

    def send_forward_recv_backward(self, features: torch.Tensor) -> torch.Tensor | None:
        """Combine `send_forward` and `recv_backward` in one batch."""
        given = self._give_forward(features, self._turns.forward())
        gradient, parts = self._next_taken_backward()
        self._exchange(given, gradient, parts)
        return gradient

    def _next_given_backward(self, gradient: torch.Tensor | None) -> list[tuple[torch.Tensor, Part]]:
        if not self._shapes.features_need_gradient(self.source.name):
            return []
        return self._give_backward(gradient, self._turns.backward())

    def _next_taken_backward(self) -> tuple[torch.Tensor | None, list[Part]]:
        """Return None if nothing of the source needs a gradient: the schedule then skips its backward pass."""
        if not self._shapes.features_need_gradient(self.source.name):
            return None, []
        return self._take_backward(self._turns.backward())

    def send_backward_recv_forward(self, gradient: torch.Tensor | None) -> torch.Tensor:
        """Combine `send_backward` and `recv_forward` in one batch."""
        given = self._next_given_backward(gradient)
        features, parts = self._take_forward(self._turns.forward())
        self._exchange(given, features, parts)
        return features.requires_grad_()


class SharedBridge(Bridge):
    """An edge whose source is on the ranks of the destination's first stage. Collective over these ranks. Redistributes
    features inside the forward pass, and their gradients in the backward pass."""

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """Redistribute the next microbatch's features [rows, hidden] from this rank's source samples to its destination
        samples."""
        return _Redistribute.apply(features, self, self._turns.forward())

    def to_destination(self, features: torch.Tensor, microbatch: int) -> torch.Tensor:
        """Exchange features without autograd."""
        given = self._give_forward(features, microbatch)
        taken, parts = self._take_forward(microbatch)
        self._exchange(given, taken, parts)
        return taken

    def to_source(self, gradient: torch.Tensor, microbatch: int) -> torch.Tensor:
        """Exchange gradients in the backward pass."""
        given = self._give_backward(gradient, microbatch)
        taken, parts = self._take_backward(microbatch)
        self._exchange(given, taken, parts)
        return taken


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: torch.Tensor, bridge: SharedBridge, microbatch: int) -> torch.Tensor:
        ctx.bridge, ctx.microbatch = bridge, microbatch
        return bridge.to_destination(features, microbatch)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.bridge.to_source(gradient, ctx.microbatch), None, None


def _replica_of(replicas: Sequence[range]) -> dict[int, int]:
    return {rank: replica for replica, members in enumerate(replicas) for rank in members}
