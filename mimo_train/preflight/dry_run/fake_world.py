"""A world of which this process is one rank and the others do not exist: torch's fake process groups.

Messages take no time and bring nothing; of objects every rank is taken to have said what this one says.
"""

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

PER_NODE = 8
"""Ranks of a node, where the config does not say."""


def join(rank: int, world: int, per_node: int = 0) -> None:
    """Be one rank of a world, for the rest of this process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    here = min(per_node or PER_NODE, world)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank % here), LOCAL_WORLD_SIZE=str(here))
    if "meta" not in dist.Backend.backend_capability["fake"]:
        dist.Backend.backend_capability["fake"].append("meta")  # the device of what is said to be on a GPU
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    for name, replacement in {
        "all_gather_object": _all_gather_object,
        "broadcast_object_list": lambda *_, **__: None,
        "barrier": lambda *_, **__: None,
        "new_group": _on_the_fake_backend(distributed_c10d.new_group),
        "new_subgroups_by_enumeration": _on_the_fake_backend(distributed_c10d.new_subgroups_by_enumeration),
    }.items():
        setattr(dist, name, replacement)
        setattr(distributed_c10d, name, replacement)


def _all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    object_list[:] = [obj] * len(object_list)


def _on_the_fake_backend(original: Callable) -> Callable:
    def make(*args: Any, **kwargs: Any) -> Any:
        kwargs["backend"] = None  # the world's
        return original(*args, **kwargs)

    return make


_WITHOUT_KERNEL = (
    "c10d::allreduce_coalesced_",
    "c10d::reduce_scatter_tensor_coalesced_",
    "c10d::allgather_into_tensor_coalesced_",
)


def answer(func: Any, name: str, args: Any) -> tuple[bool, Any]:
    """(whether it is a message for which torch has no kernel of fake tensors, its result)."""
    if name in _WITHOUT_KERNEL:
        from torch._C._distributed_c10d import FakeWork

        return True, FakeWork().boxed()
    return False, None
