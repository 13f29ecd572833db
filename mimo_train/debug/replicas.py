"""Checks that data-parallel replicas hold the same weights, which a faulty device would change."""

import hashlib

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_attr_wrapped_model

from mimo_train.models.names import modules_of
from mimo_train.models.param_gather import gathered


def require_equal_replicas(model: list[MegatronModule], step: int) -> None:
    """Compare the weights of data-parallel replicas, so that no checkpoint of diverged replicas is written. Collective
    over them.

    Args:
        model: the model chunks of this rank.
        step: steps done, for the message.

    Raises:
        RuntimeError: replicas hold different weights.
    """
    with gathered(model):
        equal = [_equal_on_replicas(chunk) for chunks in modules_of(model).values() for chunk in chunks]
    if not all(equal):
        raise RuntimeError(
            f"the weights on rank {dist.get_rank()} differ from those of its data-parallel replicas after step {step}: "
            "a device computes wrongly, or a callback changed weights on some ranks only; nothing was saved, the run "
            "continues from its last checkpoint when it is started again"
        )


def _equal_on_replicas(chunk: torch.nn.Module) -> bool:
    """Whether the ranks that hold the same weights of a model chunk hold the same values: those of other samples and,
    with context parallelism, of other parts of a sequence. Collective over these ranks.

    Megatron-Core 0.19.2's comparison (utils.py:891) asks its global state for the ranks: those of one module of
    several, without context-parallel ones.
    """
    pgs, equal = get_attr_wrapped_model(chunk, "pg_collection"), True
    for is_expert, replicas in ((False, pgs.dp_cp), (True, pgs.expt_dp)):
        weights = [weight for weight in chunk.parameters() if getattr(weight, "allreduce", True) != is_expert]
        if not weights or replicas.size() == 1:
            continue
        own = torch.frombuffer(bytearray(b"".join(map(_digest, weights))), dtype=torch.uint8).to(weights[0].device)
        everyone = torch.empty(replicas.size() * len(own), dtype=torch.uint8, device=own.device)
        dist.all_gather_into_tensor(everyone, own, group=replicas)
        equal = equal and bool((everyone.view(-1, len(own)) == own).all())
    return equal


def _digest(weight: torch.nn.Parameter) -> bytes:
    return hashlib.sha1(weight.detach().to("cpu", torch.float32).numpy()).digest()
