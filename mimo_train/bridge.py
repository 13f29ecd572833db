"""The bridge between an encoder's ranks and the language model's first stage, with shapes known in advance.

Megatron-Core 0.19.2's `BridgeCommunicator` exchanges shapes before every transfer (bridge_communicator.py:864-980),
launches a reduction for each debug message even when it is not printed (:428, 434, 512, ...), needs data-parallel
sizes that divide each other, and cannot return gradients of unequal parts to several encoder replicas
(mimo/model/base.py:528-558). This one takes the number of rows of every sample from the data plan: any pair of
data-parallel sizes and any counts, none included, with one batch of sends and receives per transfer.

Rows are features of one microbatch, [rows, hidden], in sample order. Every rank of the encoder's last stage holds all
rows of its samples; tensor-parallel rank t of the language model takes its rows from encoder rank t mod tp, and
gradients go back the same way with the roles exchanged.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.distributed as dist
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.pipeline_parallel.multimodule_communicator import MultiModulePipelineCommunicator
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from mimo_train.config import LANGUAGE
from mimo_train.layout import ModuleLayout, RunLayout

Watch = Callable[[str], AbstractContextManager]
"""Times what happens in a `with` block, by name (see `mimo_train.metrics.stopwatch`)."""


def not_timed(name: str) -> AbstractContextManager:
    """The watch that measures nothing."""
    return nullcontext()


@dataclass
class TokenPlan:
    """Rows of every sample of every microbatch of the current step, for each encoder module."""

    counts: dict[str, list[list[int]]] = field(default_factory=dict)
    """module -> microbatch -> sample of the whole microbatch -> rows."""
    step: int = 0
    """Counts the steps, so that bridges know when a new one began."""

    def begin(self, counts: dict[str, list[list[int]]]) -> None:
        """Start a step with these counts."""
        self.counts = counts
        self.step += 1


@dataclass(frozen=True)
class _Part:
    """What this rank exchanges with one peer: rows [first, last) of its own tensor."""

    peer: int
    first: int
    last: int


def parts_of(
    counts: Sequence[int], own: tuple[int, int], others: Sequence[tuple[int, int, int]]
) -> tuple[int, list[_Part]]:
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
            parts.append(_Part(peer, ends[first] - offset, ends[last] - offset))
    return ends[own[1]] - offset, parts


class PlannedBridge:
    """Carries features of one encoder to the language model and their gradients back.

    Has the methods that `MultiModulePipelineCommunicator` calls on a `BridgeCommunicator`.
    """

    def __init__(
        self,
        source: ModuleLayout,
        layout: RunLayout,
        grids: dict[str, HyperCommGrid],
        plan: TokenPlan,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        watch: Watch = not_timed,
    ):
        self._watch = watch
        self.src_module_name, self.dest_module_name = source.name, LANGUAGE
        self.src_grid, self.dest_grid = grids[source.name], grids[LANGUAGE]
        self._plan, self._samples = plan, layout.microbatch_samples
        self._hidden, self._dtype, self._device = hidden_size, dtype, device
        rank = dist.get_rank()
        forward = _routes(source, layout.language)
        backward = _routes(layout.language, source)
        source_samples = _samples_by_rank(source, self._samples, last_stage=True)
        dest_samples = _samples_by_rank(layout.language, self._samples, last_stage=False)
        self._own = source_samples.get(rank) or dest_samples.get(rank) or (0, 0)
        self._forward_to = [(peer, *dest_samples[peer]) for giver, peer in forward if giver == rank]
        self._forward_from = [(giver, *source_samples[giver]) for giver, peer in forward if peer == rank]
        self._backward_to = [(peer, *source_samples[peer]) for giver, peer in backward if giver == rank]
        self._backward_from = [(giver, *dest_samples[giver]) for giver, peer in backward if peer == rank]
        self._seen_step, self._next_forward, self._next_backward = -1, 0, 0

    def is_current_rank_in_grid(self, grid: HyperCommGrid) -> bool:
        """Whether this rank belongs to `grid`."""
        return grid.is_current_rank_in_grid()

    def send_forward(self, features: torch.Tensor) -> None:
        """Send this rank's features [rows, hidden] of the next microbatch."""
        self._exchange(self._sends(features, self._forward_to, self._count_forward()))

    def recv_forward(self) -> torch.Tensor:
        """Receive the features of this rank's samples of the next microbatch, [rows, hidden], ready for autograd."""
        receives, features = self._receives(self._forward_from, self._count_forward())
        self._exchange(receives)
        return features.requires_grad_()

    def send_backward(self, gradient: torch.Tensor | None) -> None:
        """Send the gradient of the features of the oldest microbatch whose gradient was not sent."""
        self._exchange(self._sends(gradient, self._backward_to, self._count_backward()))

    def recv_backward(self) -> torch.Tensor:
        """Receive the gradient of this rank's features, [rows, hidden], of the oldest open microbatch."""
        receives, gradient = self._receives(self._backward_from, self._count_backward())
        self._exchange(receives)
        return gradient

    def send_forward_recv_backward(self, features: torch.Tensor) -> torch.Tensor:
        """`send_forward` and `recv_backward` in one batch."""
        sends = self._sends(features, self._forward_to, self._count_forward())
        receives, gradient = self._receives(self._backward_from, self._count_backward())
        self._exchange(sends + receives)
        return gradient

    def send_backward_recv_forward(self, gradient: torch.Tensor | None) -> torch.Tensor:
        """`send_backward` and `recv_forward` in one batch."""
        sends = self._sends(gradient, self._backward_to, self._count_backward())
        receives, features = self._receives(self._forward_from, self._count_forward())
        self._exchange(sends + receives)
        return features.requires_grad_()

    def _count_forward(self) -> list[int]:
        """Rows per sample of the microbatch that goes forward next."""
        self._restart_if_new_step()
        self._next_forward += 1
        return self._plan.counts[self.src_module_name][self._next_forward - 1]

    def _count_backward(self) -> list[int]:
        """Rows per sample of the microbatch that goes backward next: in order, as in 1F1B."""
        self._restart_if_new_step()
        self._next_backward += 1
        return self._plan.counts[self.src_module_name][self._next_backward - 1]

    def _restart_if_new_step(self) -> None:
        if self._seen_step != self._plan.step:
            self._seen_step, self._next_forward, self._next_backward = self._plan.step, 0, 0

    def _sends(self, tensor: torch.Tensor | None, peers, counts: list[int]) -> list[dist.P2POp]:
        rows, parts = parts_of(counts, self._own, peers)
        if not parts:
            return []
        if tensor is None:
            # Nothing in the language model depended on these features.
            tensor = torch.zeros(rows, self._hidden, dtype=self._dtype, device=self._device)
        assert tensor.shape == (rows, self._hidden), (
            f"{self.src_module_name}: features are {tuple(tensor.shape)}, the data plan says {(rows, self._hidden)}"
        )
        tensor = tensor.detach().to(self._dtype).contiguous()
        return [dist.P2POp(dist.isend, tensor[part.first : part.last], part.peer) for part in parts]

    def _receives(self, peers, counts: list[int]) -> tuple[list[dist.P2POp], torch.Tensor]:
        rows, parts = parts_of(counts, self._own, peers)
        tensor = torch.empty(rows, self._hidden, dtype=self._dtype, device=self._device)
        return [dist.P2POp(dist.irecv, tensor[part.first : part.last], part.peer) for part in parts], tensor

    def _exchange(self, operations: list[dist.P2POp]) -> None:
        if operations:
            with self._watch("bridge_wait"):
                for work in dist.batch_isend_irecv(operations):
                    work.wait()


class TimedP2PCommunicator(P2PCommunicator):
    """Megatron-Core's communicator between the stages of one module, timed as `pipeline_wait`."""

    def __init__(self, pp_group: dist.ProcessGroup, config, watch: Watch):
        super().__init__(pp_group, config)
        self._watch = watch

    def _communicate(self, **arguments):
        # Every send and receive begins here, and ends here unless communication overlaps with computation.
        with self._watch("pipeline_wait"):
            previous, following, handles = super()._communicate(**arguments)
        if handles:
            handles = {name: _TimedHandle(handle, self._watch) for name, handle in handles.items()}
        return previous, following, handles


class _TimedHandle:
    """A message on its way, whose wait is timed as `pipeline_wait`."""

    def __init__(self, handle: dist.Work, watch: Watch):
        self._handle, self._watch = handle, watch

    def wait(self) -> None:
        """Wait until the message has arrived, or may be overwritten."""
        with self._watch("pipeline_wait"):
            self._handle.wait()


class PlannedCommunicator(MultiModulePipelineCommunicator):
    """Megatron-Core's communicator over `PlannedBridge` instead of its own bridge; `watch` times both of its kinds."""

    def __init__(
        self, layout: RunLayout, grids, config, plan: TokenPlan, device: torch.device, watch: Watch = not_timed
    ):
        self._watch = watch
        self._bridge_arguments = (layout, grids, plan, config.hidden_size, config.pipeline_dtype, device, watch)
        topology = {name: [] if name == LANGUAGE else [LANGUAGE] for name in layout.modules}
        super().__init__(grids, topology, config, module_output_ndim={name: 2 for name in topology if name != LANGUAGE})

    def _build_bridge_comms(self) -> None:
        layout = self._bridge_arguments[0]
        self.bridge_comms = [
            PlannedBridge(module, *self._bridge_arguments)
            for name, module in layout.modules.items()
            if name != LANGUAGE
        ]

    def _build_rank_module_info_map(self) -> None:
        super()._build_rank_module_info_map()
        for info in self.rank_module_map.values():
            info.p2p_communicator = TimedP2PCommunicator(info.p2p_communicator.pp_group, self.config, self._watch)


def _stage_ranks(module: ModuleLayout, stage: int) -> list[list[int]]:
    """Ranks of one stage as [dp][tp] (cp is 1)."""
    start = module.first_rank + stage * module.tp * module.cp * module.dp
    return [[start + replica * module.tp + rank for rank in range(module.tp)] for replica in range(module.dp)]


def _boundary(module: ModuleLayout) -> list[list[int]]:
    """Ranks [dp][tp] that face the other module: the encoder's last stage, the language model's first."""
    return _stage_ranks(module, 0 if module.name == LANGUAGE else module.pp - 1)


def _routes(giver: ModuleLayout, taker: ModuleLayout) -> list[tuple[int, int]]:
    """(giving rank, taking rank) pairs: every taking rank has one giving rank in every replica of the giver."""
    return [
        (replica[index % giver.tp], taking)
        for taking_replica in _boundary(taker)
        for index, taking in enumerate(taking_replica)
        for replica in _boundary(giver)
    ]


def _samples_by_rank(module: ModuleLayout, samples: int, last_stage: bool) -> dict[int, tuple[int, int]]:
    """Samples [first, last) of a microbatch on each rank of the stage that faces the other module."""
    share = samples // module.dp
    replicas = _stage_ranks(module, module.pp - 1 if last_stage else 0)
    return {rank: (index * share, (index + 1) * share) for index, ranks in enumerate(replicas) for rank in ranks}
