"""Collectives of a group of one rank return at once.

A layout with tp, dp or pp of 1 has a group for it all the same, and Megatron-Core 0.19.2 sums over it: with one process
12 times in a step of the demo, for 7 % of its time. Every result of one rank is what it gave: nothing to send, nothing
to record. The methods of torch's class are replaced once in a process, around those that record messages.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_SAME_REDUCTIONS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
"""Of one operand they are the operand; `PREMUL_SUM` is not."""

_IN_PLACE = ("allreduce", "allreduce_coalesced", "broadcast", "barrier")
"""Operations whose result is in the tensors that they are given."""

_INTO_FIRST = (
    "_allgather_base",
    "_reduce_scatter_base",
    "allgather_into_tensor_coalesced",
    "reduce_scatter_tensor_coalesced",
)
"""Operations of outputs and inputs of equal sizes: a tensor of each, or lists."""

_installed: list[bool] = []


class Done(dist.Work):
    """The work of an operation that is over."""

    def wait(self, *_: Any, **__: Any) -> bool:
        """There is nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """Yes."""
        return True


def return_at_once() -> None:
    """Let the collectives of one rank return at once, in all process groups."""
    if _installed:
        return
    _installed.append(True)
    for name in (*_IN_PLACE, *_INTO_FIRST):
        setattr(dist.ProcessGroup, name, _unless_alone(getattr(dist.ProcessGroup, name), copies=name in _INTO_FIRST))


def _unless_alone(original: Callable, copies: bool) -> Callable:
    def call(group: Any, *arguments: Any, **options: Any) -> Any:
        if group.size() > 1 or not _is_same((*arguments, *options.values())):
            return original(group, *arguments, **options)
        if copies:
            outputs, inputs = (each if isinstance(each, list) else [each] for each in arguments[:2])
            for into, given in zip(outputs, inputs, strict=True):
                if into.data_ptr() != given.data_ptr():
                    into.copy_(given.view_as(into))
        return Done()

    return call


def _is_same(arguments: tuple) -> bool:
    """Whether an operation with these options gives what it gets."""
    operation = getattr(arguments[-1], "reduceOp", None) if arguments else None
    # Not `in`, which asks the members: only the operation of an option knows that it equals one of them.
    return operation is None or any(operation == same for same in _SAME_REDUCTIONS)
