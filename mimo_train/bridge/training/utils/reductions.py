"""Values that the ranks of a model-parallel group must agree on."""

import math

import torch
import torch.distributed as dist

from mimo_train.parallel import device


def reduce_max_stat_across_model_parallel_group(stat: float | None, mp_group: dist.ProcessGroup) -> float | None:
    """Return the largest of the ranks' values, the same on every rank of the group. Collective; copies to the host.

    Args:
        stat: this rank's value; None if it has none, such as the gradient norm of a rank that trains nothing.

    Returns:
        The maximum, NaN if any rank has NaN, None if no rank has a value.
    """
    is_nan = stat is not None and math.isnan(stat)
    value = -math.inf if stat is None or is_nan else stat
    # Backends differ in the maximum with NaN, so NaN and missing values are sent as flags.
    message = torch.tensor([value, stat is not None, is_nan], dtype=torch.float64, device=device.current())
    dist.all_reduce(message, op=dist.ReduceOp.MAX, group=mp_group)
    largest, found, any_nan = message.tolist()
    return (math.nan if any_nan else largest) if found else None


def logical_and_across_model_parallel_group(input: bool, mp_group: dist.ProcessGroup) -> bool:
    """Return True if `input` is true on every rank of the group. Collective; copies to the host."""
    message = torch.tensor(int(input), device=device.current())
    dist.all_reduce(message, op=dist.ReduceOp.MIN, group=mp_group)
    return bool(message.item())
