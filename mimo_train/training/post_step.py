"""What is due between two steps: straggler report, profilers, garbage collection, comparison of replicas."""

from typing import Any

import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import check_param_hashes_across_dp_replicas
from torch.profiler import profile

from mimo_train.config import ConfigContainer
from mimo_train.training.forward_hooks import disable_forward_pre_hook, enable_forward_pre_hook
from mimo_train.training.garbage import collect_when_due
from mimo_train.training.profiling import NsysCapture, end_after_last_step
from mimo_train.training.straggler import StragglerTimer


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
    equal = check_param_hashes_across_dp_replicas(model, cross_check=True)
    if toggle_forward_pre_hook:
        enable_forward_pre_hook(model)
    if not equal:
        raise RuntimeError(
            f"the weights on rank {dist.get_rank()} differ from those of its data-parallel replicas after step {step}: "
            "a device computes wrongly, or a callback changed weights on some ranks only; nothing was saved, the run "
            "continues from its last checkpoint when it is started again"
        )
