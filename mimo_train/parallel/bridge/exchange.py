"""Bridges send features from the source's last stage to the destination's first stage, and gradients back.

Megatron-Core 0.19.2's `BridgeCommunicator` exchanges shapes before every transfer (bridge_communicator.py:864-980) and
reduces once per debug message (:428, 434, 512, ...). It requires data-parallel sizes that divide each other and no
context parallelism (:105-116), and cannot return gradients of unequal parts to several encoder replicas
(mimo/model/base.py:528-558). Its `ColocatedBridgeCommunicator` requires equal counts in every sample, one stage and no
context parallelism (colocated_communicator.py:47-50, 118-154). The bridges here know the number of rows of every sample
from the data index. They support any data-parallel sizes and any counts, with one batch of sends and receives per
transfer.

Rows are the features of one microbatch, [rows, hidden], in sample order. Every rank of a replica holds all rows of the
replica's media items. A source's items are in sample order, so that the rows for a destination follow each other. A
destination receives rows source by source, and puts them into sample order by one `index_select`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.hyper_comm_grid import HyperCommGrid

from mimo_train.flight.file_format import BACKWARD, FORWARD
from mimo_train.flight.recorder import RECORDER
from mimo_train.layout.placement import Edge
from mimo_train.layout.run import Run
from mimo_train.parallel.bridge.shapes import Part, StepShapes, Turns, parts_of, replica_ranks, routes
from mimo_train.parallel.device import to_device

Watch = Callable[[str], AbstractContextManager]
"""A function that times a `with` block by name (see `mimo_train.logging.stopwatch`)."""


def not_timed(name: str) -> AbstractContextManager:
    """Measure nothing."""
    return nullcontext()


class Bridge:
    """The routes of feature rows along one edge, and the exchange itself. `FORWARD` is from the source to the
    destination, `BACKWARD` from the destination to the source.

    Args:
        edge: source and destination module.
        shapes: routes of the current step.
        hidden_size: width of a row, which is the destination's.
        group: the ranks of this edge; None on a rank that neither sends nor receives, and over gloo, where messages of
            an edge have its number as tag.
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
        self.source, self.destination = run.layout.modules[edge.source], run.layout.modules[edge.destination]
        self._name, self._shapes, self._group, self._watch = f"{edge.source}->{edge.destination}", shapes, group, watch
        self._hidden, self._dtype, self._device = hidden_size, dtype, device
        self._tag = run.layout.edges.index(edge)
        self._rank = rank = dist.get_rank()
        self._turns = Turns(shapes)
        self.while_waiting: Callable[[], None] | None = None
        # By direction: the replica of each sending rank, and the ranks that this rank sends to or receives from.
        senders = {
            FORWARD: replica_ranks(self.source, self.source.pp - 1),
            BACKWARD: replica_ranks(self.destination, 0),
        }
        self._replica = {
            direction: {member: replica for replica, members in enumerate(ranks) for member in members}
            for direction, ranks in senders.items()
        }
        self._sends_to: dict[int, list[int]] = {}
        self._receives_from: dict[int, list[int]] = {}
        for direction, opposite in ((FORWARD, BACKWARD), (BACKWARD, FORWARD)):
            pairs = routes(senders[direction], senders[opposite])
            self._sends_to[direction] = [receiver for sender, receiver in pairs if sender == rank]
            self._receives_from[direction] = [sender for sender, receiver in pairs if receiver == rank]

    def _rows_to_send(
        self, direction: int, rows: torch.Tensor | None, microbatch: int
    ) -> list[tuple[torch.Tensor, Part]]:
        """Return the part of `rows` for each receiver. None are zeros: nothing in the destination depends on them."""
        counts, parts = self._parts(direction, self._sends_to[direction], direction, microbatch)
        if not parts:
            return []
        if rows is None:
            rows = torch.zeros(sum(counts), self._hidden, dtype=self._dtype, device=self._device)
        assert rows.shape == (sum(counts), self._hidden), (
            f"{self.source.name}: features are {tuple(rows.shape)}, the data index says {(sum(counts), self._hidden)}"
        )
        rows = rows.detach().to(self._dtype).contiguous()
        if direction == BACKWARD and (order := self._order(microbatch)) is not None:
            rows = rows.index_select(0, to_device(order.argsort(), self._device))
        return [(rows[part.first : part.last], part) for part in parts]

    def _receive(self, direction: int, microbatch: int, sent: list[tuple[torch.Tensor, Part]]) -> torch.Tensor:
        """Send the parts in `sent`, and return the rows that arrive, in the order of this side."""
        opposite = BACKWARD if direction == FORWARD else FORWARD
        counts, parts = self._parts(direction, self._receives_from[direction], opposite, microbatch)
        rows = torch.empty(sum(counts), self._hidden, dtype=self._dtype, device=self._device)
        self._exchange(sent, rows, parts)
        if direction == FORWARD and (order := self._order(microbatch)) is not None:
            rows = rows.index_select(0, to_device(order, self._device))
        return rows

    def _parts(self, direction: int, peers: list[int], side: int, microbatch: int) -> tuple[list[int], list[Part]]:
        """Return the rows that this rank exchanges with each data-parallel rank of the other side, and those with each
        peer. `side` is the direction in which this rank sends."""
        RECORDER.at(self._name, direction, microbatch)
        routes, replica = self._shapes.routes(self.source, microbatch), self._replica[side][self._rank]
        if side == FORWARD:
            other_side, counts = BACKWARD, routes.sent(replica, self.destination.dp).tolist()
        else:
            other_side, counts = FORWARD, routes.received(replica, self.source.dp).tolist()
        return counts, parts_of(counts, [(peer, self._replica[other_side][peer]) for peer in peers])

    def _order(self, microbatch: int) -> torch.Tensor | None:
        """Return `Routes.order` of this rank of the destination."""
        order = self._shapes.routes(self.source, microbatch).order(self._replica[BACKWARD][self._rank])
        return None if order is None else torch.from_numpy(order)

    def _exchange(
        self,
        sent: list[tuple[torch.Tensor, Part]],
        received: torch.Tensor | None = None,
        parts: Sequence[Part] = (),
    ) -> None:
        """Send the parts in `sent` and fill `received`, in one batch. Copy the parts that stay on this rank."""
        works = self._post(sent, received, parts)
        if self.while_waiting:
            # Called even if this rank exchanges nothing: the function may be collective over a replica's ranks.
            self.while_waiting()
        self._wait(works)

    def _post(
        self, sent: list[tuple[torch.Tensor, Part]], received: torch.Tensor | None, parts: Sequence[Part]
    ) -> list[dist.Work]:
        """Start an exchange. `sent` and `received` must live until the end of its works."""
        operations = [
            dist.P2POp(dist.isend, rows, part.peer, self._group, self._tag)
            for rows, part in sent
            if part.peer != self._rank
        ]
        for part in parts:
            assert received is not None, "there are parts, and no tensor for them"
            rows = received[part.first : part.last]
            if part.peer == self._rank:
                (local,) = [rows for rows, part in sent if part.peer == self._rank]
                rows.copy_(local)
            else:
                operations.append(dist.P2POp(dist.irecv, rows, part.peer, self._group, self._tag))
        return dist.batch_isend_irecv(operations) if operations else []

    def _wait(self, works: list[dist.Work]) -> None:
        if works:
            with self._watch("bridge_wait"):
                for work in works:
                    work.wait()


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

    def begin(self, microbatches: int, forward_only: bool) -> None:
        """Prepare for a step's schedule."""

    def finish(self) -> None:
        """End a step's schedule."""

    def is_current_rank_in_grid(self, grid: HyperCommGrid) -> bool:
        """True if this rank belongs to `grid`."""
        return grid.is_current_rank_in_grid()

    def send_forward(self, features: torch.Tensor) -> None:
        """Send this rank's features [rows, hidden] of the next microbatch."""
        self._exchange(self._rows_to_send(FORWARD, features, self._turns.next(FORWARD)))

    def recv_forward(self) -> torch.Tensor:
        """Receive the features of this rank's samples of the next microbatch, [rows, hidden], ready for autograd."""
        return self._receive_forward([])

    def send_backward(self, gradient: torch.Tensor | None) -> None:
        """Send the gradient of the oldest received features without one; None means zeros."""
        self._exchange(self._gradient_to_send(gradient))

    def recv_backward(self) -> torch.Tensor | None:
        """Receive the gradient [rows, hidden] of the oldest sent features without one. None if nothing of the source
        needs a gradient: the schedule then skips its backward pass."""
        return self._receive_backward([])

    def send_forward_recv_backward(self, features: torch.Tensor) -> torch.Tensor | None:
        """Combine `send_forward` and `recv_backward` in one batch."""
        return self._receive_backward(self._rows_to_send(FORWARD, features, self._turns.next(FORWARD)))

    def send_backward_recv_forward(self, gradient: torch.Tensor | None) -> torch.Tensor:
        """Combine `send_backward` and `recv_forward` in one batch."""
        return self._receive_forward(self._gradient_to_send(gradient))

    def _gradient_to_send(self, gradient: torch.Tensor | None) -> list[tuple[torch.Tensor, Part]]:
        if not self._shapes.features_need_gradient(self.source.name):
            return []
        return self._rows_to_send(BACKWARD, gradient, self._turns.next(BACKWARD))

    def _receive_forward(self, sent: list[tuple[torch.Tensor, Part]]) -> torch.Tensor:
        return self._receive(FORWARD, self._turns.next(FORWARD), sent).requires_grad_()

    def _receive_backward(self, sent: list[tuple[torch.Tensor, Part]]) -> torch.Tensor | None:
        if not self._shapes.features_need_gradient(self.source.name):
            self._exchange(sent)
            return None
        return self._receive(BACKWARD, self._turns.next(BACKWARD), sent)


class SharedBridge(Bridge):
    """An edge whose source is on the ranks of the destination's first stage. Collective over these ranks. Redistributes
    features inside the forward pass, and their gradients in the backward pass."""

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """Redistribute the next microbatch's features [rows, hidden] from this rank's source samples to its destination
        samples."""
        return _Redistribute.apply(features, self, self._turns.next(FORWARD))

    def redistribute(self, direction: int, rows: torch.Tensor, microbatch: int) -> torch.Tensor:
        """Exchange features (forward) or gradients (backward) without autograd."""
        return self._receive(direction, microbatch, self._rows_to_send(direction, rows, microbatch))


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: torch.Tensor, bridge: SharedBridge, microbatch: int) -> torch.Tensor:
        ctx.bridge, ctx.microbatch = bridge, microbatch
        return bridge.redistribute(FORWARD, features, microbatch)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.bridge.redistribute(BACKWARD, gradient, ctx.microbatch), None, None
