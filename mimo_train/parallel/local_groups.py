"""The process groups of one rank: it makes those that it belongs to and no others, each once.

With torch's default a rank calls `new_group` for every group of the run, 10,872 times at 2,176 ranks, and joins a
collective over the world for each. Here groups are made with `use_local_synchronization`, by their members alone, so
that the number of calls and of messages does not grow with the world. That excludes a `device_id` bound to the world's
group: NCCL would then split every group off the world's communicator, which waits for all ranks (torch 2.11,
distributed_c10d.py:1977-1997).

Members of groups that overlap must make them in one order. Every rank goes through the same list of axes, whose groups
are disjoint, and makes its own in passing.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core.hyper_comm_grid import HyperCommGrid
from torch.distributed import distributed_c10d

from mimo_train.parallel import device

LAYERS = "layers"
"""Messages inside layers: tensor, context and expert parallel."""
GRADIENTS = "gradients"
"""Sums of gradients and norms, which may run beside those of the layers."""
STAGES = "stages"
"""Messages between the stages of one module."""
EMBEDDING = "embedding"
"""The sum of gradients of weights that the first stage and the last one share."""
BRIDGE = "bridge"
"""Messages between modules."""

_BETWEEN_TWO = (STAGES, BRIDGE)


class OwnGroups:
    """Makes this rank's groups.

    Groups of the same ranks are one where they serve the same purpose of the same owner. Others are kept apart: a
    communicator of NCCL runs its messages in the order in which they were issued, and a send waits for its receiver, so
    that two uses of one would have to be issued in one order on all ranks. None is the world's, which belongs to the
    sum of a step.

    Attributes:
        made: ranks of every group that was made, in order.
    """

    def __init__(self, timeout: timedelta):
        self.made: list[tuple[int, ...]] = []
        self._timeout = timeout
        self._groups: dict[tuple[str, str, tuple[int, ...]], dist.ProcessGroup] = {}
        self._backend = device.backend_of_groups()

    def of(self, ranks: Sequence[int], owner: str, purpose: str, description: str) -> dist.ProcessGroup:
        """The group of `ranks`, of which this rank is one; collective over them.

        Args:
            owner: the module, or the edge between two.
            description: for the flight recorder's reports; that of the first use names a group.
        """
        assert dist.get_rank() in ranks, (dist.get_rank(), ranks)
        # All groups of this rank alone are one: nobody else could issue in another order.
        key = ("", "", tuple(ranks)) if len(ranks) == 1 else (owner, purpose, tuple(ranks))
        if key not in self._groups:
            self.made.append(tuple(ranks))
            with _named(" ".join(map(str, key))):
                group = dist.new_group(
                    list(ranks),
                    timeout=self._timeout,
                    backend=self._backend,
                    use_local_synchronization=True,
                    group_desc=description if len(ranks) > 1 else "this rank alone",
                )
            if len(ranks) > 1 and purpose in _BETWEEN_TWO:
                # A communicator of NCCL begins with its first message, for which all its ranks must come, and not all
                # of them take part in the first one between two (torch's `batch_isend_irecv`).
                dist.all_reduce(torch.zeros(1, device=device.current()), group=group)
            self._groups[key] = group
        return self._groups[key]


def limit_waits(minutes: float) -> None:
    """Let collectives of every group of this process wait for so long from now on. With gloo (torch 2.11) a message
    between two ranks waits for as long as when its group was made."""
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timedelta(minutes=minutes), group)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Names the group that is made in the block: members meet under its name. torch 2.11 takes the number of groups
    that a rank has into the name of one with local synchronisation (`_hash_ranks_to_str`), which is another one on
    members that are in other groups besides: they would wait for each other. In a process that sets up several runs,
    one after the other, all members have made as many groups of this name."""
    original = distributed_c10d._process_group_name
    taken = {*distributed_c10d._world.pg_names.values()}
    names = (hashlib.sha256(f"{name}, {number}".encode()).hexdigest() for number in itertools.count())
    own = distributed_c10d.GroupName(next(each for each in names if each not in taken))
    distributed_c10d._process_group_name = lambda ranks, use_hashed_name: own
    try:
        yield
    finally:
        distributed_c10d._process_group_name = original


class OwnGrid(HyperCommGrid):
    """A grid of ranks with this rank's groups. That of Megatron-Core 0.19.2 makes every group of an axis on every rank
    (`new_subgroups_by_enumeration`, hyper_comm_grid.py)."""

    def __init__(self, shape: list[int], axes: list[str], rank_offset: int, name: str, own: OwnGroups):
        super().__init__(shape, axes, rank_offset=rank_offset)
        self._name, self._own = name, own
        self._of_axes: dict[frozenset[str], dist.ProcessGroup | None] = {}

    def create_pg(
        self, dims: str | list[str], *, view: str | None = None, purpose: str = LAYERS
    ) -> dist.ProcessGroup | None:
        """This rank's group along `dims`; None where it is not in the grid."""
        dims = [dims] if isinstance(dims, str) else dims
        rank = dist.get_rank()
        ranks = next((each for each in self.get_rank_enum(dims, view=view) if rank in each), None)
        group = self._own.of(ranks, self._name, purpose, f"{self._name} {'-'.join(dims)}") if ranks else None
        # The names of axes are different in all views, but for those that the views share.
        self._of_axes[frozenset(dims)] = group
        return group

    def get_pg(self, dims: str | list[str], *, view: str | None = None) -> dist.ProcessGroup | None:
        """The group that `create_pg` has made.

        Raises:
            KeyError: it has made none.
        """
        return self._of_axes[frozenset([dims] if isinstance(dims, str) else dims)]
