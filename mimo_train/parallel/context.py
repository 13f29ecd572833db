"""Context parallelism of the language model: the part of a sequence on each rank, and how to gather the parts.

A sequence of S tokens is cut in 2 cp chunks. Rank r has chunks r and 2 cp - 1 - r, so causal attention is equal work
on every rank (Megatron-Core's order, `get_batch_on_this_cp_rank`).

Shape suffixes: B batch, S sequence, C = S / cp positions of one rank.
"""

from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.utils import get_batch_on_this_cp_rank


def own_part(batch: dict[str, Any], cp_group: dist.ProcessGroup) -> dict[str, Any]:
    """Return a microbatch with this rank's part [B, C, ...] of every tensor [B, S, ...]. Other values are unchanged."""
    if cp_group.size() == 1:
        return batch
    tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor) and value.dim() > 1}
    return batch | get_batch_on_this_cp_rank(tensors, is_hybrid_cp=False, cp_group=cp_group)


def local_offsets(chosen_BS: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Return the offsets in a context-parallel rank's part [B * C] where a mask is not 0: ascending int64 on the host.
    On the host their number is known without waiting for a device."""
    batch, length = chosen_BS.shape
    if ranks > 1:
        chunks_BXC = chosen_BS.view(batch, 2 * ranks, length // (2 * ranks))
        chosen_BS = chunks_BXC[:, list(chunks_of(rank, ranks))]
    return torch.from_numpy(numpy.flatnonzero(numpy.asarray(chosen_BS)))


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """Return the numbers of a rank's two chunks."""
    return rank, 2 * ranks - 1 - rank


def gather_sequence(part_C: torch.Tensor, cp_group: dist.ProcessGroup) -> torch.Tensor:
    """Return the whole sequence [S, ...] in order, from the parts [C, ...] of all ranks. The gradient of each part is
    summed over all ranks."""
    ranks = cp_group.size()
    if ranks == 1:
        return part_C
    gathered = gather_from_sequence_parallel_region(part_C, tensor_parallel_output_grad=True, group=cp_group)
    chunks = [chunk for rank in range(ranks) for chunk in chunks_of(rank, ranks)]
    pieces = gathered.chunk(2 * ranks, dim=0)
    return torch.cat([pieces[chunks.index(chunk)] for chunk in range(2 * ranks)])


def sum_gradients(sequence: torch.Tensor, cp_group: dist.ProcessGroup) -> torch.Tensor:
    """Return `sequence` unchanged, with its gradient summed over the ranks: each rank uses a part of it."""
    return sequence if cp_group.size() == 1 else copy_to_tensor_model_parallel_region(sequence, group=cp_group)
