"""Repeated steps: Megatron-Core's rerun state machine tells hardware faults from bad numbers of the run.

With `train.rerun=validate_results` the loss of every microbatch is checked. If one is not finite, or ten times the
largest seen, all ranks rerun the step before the update:

- the loss was too large and differs in the rerun: a transient fault; the step continues with the new result;
- the loss was not finite and differs in the rerun: the run ends with exit code 17 and resumes from its newest
  checkpoint;
- the loss is not finite again: the run saves a checkpoint and ends with exit code 16; restarted on another machine it
  repeats the step there, and reports if the device or the run is at fault.

With any `train.rerun`, the weights of data-parallel replicas are compared before a checkpoint is saved.
"""

import hashlib
import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import rerun_state_machine
from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode, RerunState, RerunStateMachine
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_attr_wrapped_model

from mimo_train.models.parameters import gathered, modules_of
from mimo_train.models.sharding import ShardedModule
from mimo_train.parallel import device

SPIKE = 10.0
"""A loss this many times the largest of the first `SPIKE_SAMPLES` microbatches is suspect."""
SPIKE_SAMPLES = 100


class Rerun:
    """Repeats a step's passes as the state machine requires. If enabled, it copies every loss to the host, and ranks
    synchronise once or twice per step."""

    def __init__(self, mode: str, report_interval: int = 1):
        """Take `train.rerun` and the number of steps between reports of `report_determinism_stats`."""
        self._machine = None
        if mode == RerunMode.DISABLED:
            return
        # The state machine omits the tracker of tensor-parallel generators, which dropout uses.
        self._machine = RerunStateMachine(device.get_rng_state, device.set_rng_state, RerunMode(mode))
        RerunStateMachine.REPORTING_INTERVAL_ITERATIONS = report_interval
        _show_messages(logging.INFO if mode == RerunMode.REPORT_DETERMINISM_STATS else logging.WARNING)

    def runs(self, data_iterator: Any) -> Iterator[None]:
        """Yield once for each required run of the step. Collective, unless disabled."""
        if self._machine is None:
            yield
            return
        replay = _Replay(data_iterator)
        while self._machine.should_run_forward_backward(replay):
            yield

    def verdict(self) -> tuple[bool, bool, int]:
        """Return (save a checkpoint, end the run, exit code) after a step's runs."""
        return (False, False, 0) if self._machine is None else self._machine.should_checkpoint_and_exit()

    def validate(self, loss: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """Validate a mean loss during a step, from its sum over tokens and their number, both 0-d."""
        machine = self._machine
        if machine is None or machine.state == RerunState.NOT_RUNNING_YET:
            return
        loss = loss.detach() / num_tokens.clamp(min=1)
        if machine.mode == RerunMode.REPORT_DETERMINISM_STATS:
            machine.validate_result(loss, torch.isnan, "loss")
            return
        machine.validate_result(loss, torch.isnan, "the loss is not a number", fatal=True)
        machine.validate_result(loss, torch.isinf, "the loss is infinite", fatal=True)
        large = partial(machine.is_unexpectedly_large, threshold=SPIKE, context="loss", num_samples=SPIKE_SAMPLES)
        machine.validate_result(loss, large, "the loss is suddenly large", fatal=False)

    def state_dict(self, data_iterator: Any) -> dict[str, Any] | None:
        """Return this rank's state for repeating the step after a restart; None if no step is to be repeated."""
        if self._machine is None:
            return None
        state = self._machine.state_dict(_Replay(data_iterator), "torch_dist")
        if not self._machine.validate_state_dict(state):
            return None
        return {**state, "sharded": state["sharded"].data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Repeat the step of the checkpoint if the mode is still the same."""
        if self._machine is not None and self._machine.mode == state["mode"]:
            self._machine.load_state_dict(state)


class _Replay(RerunDataIterator):
    """Adapts a `StepIterator` to the state machine, which can rewind the microbatches of a step."""

    def rewind(self) -> None:
        self.iterable.rewind()

    def advance(self) -> None:
        """Nothing to do: the loop advances the data."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to do: the train state has the position in the data."""


def _show_messages(level: int) -> None:
    """Show the state machine's messages on standard error; Megatron-Core's others stay silent."""
    logger = logging.getLogger(rerun_state_machine.__name__)
    logger.setLevel(level)
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
        logger.propagate = False


def require_equal_replicas(model: list[MegatronModule], step: int) -> None:
    """Compare the weights of data-parallel replicas after `step` steps, before a checkpoint. Collective over them.

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
    """True if all ranks that hold the same weights of a model chunk have equal values. Collective over these ranks.

    Megatron-Core 0.19.2's comparison (utils.py:891) takes the ranks from its global state: one module only, and no
    context-parallel ranks.
    """
    if isinstance(chunk, ShardedModule):
        return True  # no rank has a copy
    pgs, equal = get_attr_wrapped_model(chunk, "pg_collection"), True
    for is_expert, replicas in ((False, pgs.dp_cp), (True, pgs.expt_dp)):
        weights = [weight for weight in chunk.parameters() if getattr(weight, "allreduce", True) != is_expert]
        if not weights or replicas.size() == 1:
            continue
        local = torch.frombuffer(bytearray(b"".join(map(_digest, weights))), dtype=torch.uint8).to(weights[0].device)
        everyone = torch.empty(replicas.size() * len(local), dtype=torch.uint8, device=local.device)
        dist.all_gather_into_tensor(everyone, local, group=replicas)
        equal = equal and bool((everyone.view(-1, len(local)) == local).all())
    return equal


def _digest(weight: torch.nn.Parameter) -> bytes:
    return hashlib.sha1(weight.detach().to("cpu", torch.float32).numpy()).digest()
