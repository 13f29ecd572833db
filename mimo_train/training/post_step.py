"""What is due between two steps: straggler report, profilers, garbage collection, comparison of replicas."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_attr_wrapped_model
from torch.profiler import profile

from mimo_train.config.schema import ConfigContainer
from mimo_train.diagnose.profiling import NsysCapture, end_after_last_step
from mimo_train.diagnose.straggler import StragglerTimer
from mimo_train.model.build import modules_of
from mimo_train.step.forward_hooks import disable_forward_pre_hook, enable_forward_pre_hook
from mimo_train.training.garbage import collect_when_due


def post_training_step_callbacks(
    model: list[MegatronModule],
    num_floating_point_operations_since_last_log_event: float,
    straggler_timer: StragglerTimer | None,
    iteration: int,
    prof: profile | None,
    config: ConfigContainer,
    should_toggle_forward_pre_hook: bool,
    nsys_nvtx_context: NsysCapture | None = None,
) -> None:
    """Do what is due after a step; called by every rank after every step.

    - `log.straggler`: the report of `straggler_timer`, every `train.log_interval` steps;
    - `train.rerun`, unless disabled: before a step that `checkpoint.save_interval` saves, the weights of data-parallel
      replicas are compared, so that no checkpoint is written of replicas that a fault has driven apart;
    - `profiling`: the end of the recording, after its last step;
    - `train.manual_gc_interval`: garbage collection.

    Args:
        model: the model chunks of this rank.
        num_floating_point_operations_since_last_log_event: of all ranks, for the report.
        straggler_timer: the times of the ranks; None: no report.
        iteration: steps done.
        prof: torch's profiler, while it records.
        config: the run.
        should_toggle_forward_pre_hook: whether forward pre-hooks hold back parameters that are still on their way, and
            have to be off while weights are compared.
        nsys_nvtx_context: the capture of nsys, while it records.

    Raises:
        RuntimeError: replicas hold different weights.
    """
    if straggler_timer is not None and iteration % config.train.log_interval == 0:
        straggler_timer.report(num_floating_point_operations_since_last_log_event, config.train.log_interval)
    interval = config.checkpoint.save_interval
    if config.train.rerun != "disabled" and interval > 0 and iteration % interval == 0:
        _require_equal_replicas(model, iteration, should_toggle_forward_pre_hook)
    end_after_last_step(config, iteration, prof, nsys_nvtx_context)
    collect_when_due(config.train.manual_gc_interval, iteration)


def _require_equal_replicas(model: list[Any], step: int, toggle_forward_pre_hook: bool) -> None:
    if toggle_forward_pre_hook:
        disable_forward_pre_hook(model)
    equal = [_equal_on_replicas(chunk) for chunks in modules_of(model).values() for chunk in chunks]
    if toggle_forward_pre_hook:
        enable_forward_pre_hook(model)
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
