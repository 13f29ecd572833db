"""The optimizer of all modules: clip groups, the check for non-finite gradients, loss scaling, freeze stages.
Megatron-Core's `MimoOptimizer.step` makes three reductions over all ranks and one more for every module, and waits for
the device after each. Here norms, overflows and counts of zeros share one reduction and one copy to the host."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.mimo.optimizer import MimoOptimizer, ModuleOptimizerInfo
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.grad_scaler import DynamicGradScaler, MegatronGradScaler
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer, MegatronOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from mimo_train.models.parameter_norms import squares_of
from mimo_train.models.sharding import ShardedModule
from mimo_train.optim.group_optimizer import IS_WAITING

_LEAST_NORM = 1e-6
"""Added to a norm before dividing by it, as in Megatron-Core (clip_grads.py:179)."""

RELEASE = "release"
"""Key of a parameter group: the step from which it is trained (`modules.NAME.freeze_until`)."""


@dataclass(frozen=True)
class GradNorms:
    """L2 norms of a step's gradients over all ranks, before clipping; the same on every rank."""

    squares: dict[str, float]
    """Square of the norm by module."""
    total: float
    """The norm over all modules; inf or nan if any gradient is not finite: weights must not be updated."""
    num_zeros: int | None = None
    """Number of gradient elements that are zero; None unless they are counted."""


class ModuleOptimizer(MimoOptimizer):
    """One Megatron-Core optimizer per module, stepped together: `reduce_norms`, `clip`, `update`.

    Attributes:
        updates: optimizer steps made, without skipped iterations; the same on every rank.
        module_grad_norms: L2 norm of the gradient of every trained module in the last step, before clipping.
        releases: the step from which a parameter of this rank is trained, if it is frozen at first.
        before_update: called before a step changes weights and states.
        grad_scaler: scales the loss of fp16, else None. One for all modules: separate scales would diverge, since
            Megatron-Core updates a module's scaler by the overflows of that module alone.
    """

    def __init__(
        self,
        infos: dict[str, ModuleOptimizerInfo],
        config: OptimizerConfig,
        *,
        clip_grads: dict[str, float | None],
        grad_scaler: MegatronGradScaler | None,
        chunks: list[DistributedDataParallel | ShardedModule],
        releases: dict[torch.nn.Parameter, int],
        device: torch.device,
    ):
        """
        Args:
            infos: by module; this rank's optimizers.
            config: the run's.
            clip_grads: largest gradient norm of each trained module that is clipped separately; None for modules that
                `config.clip_grad` clips together. 0 does not clip.
            chunks: this rank's wrapped chunks of all modules.
            releases: the step from which a parameter of this rank is trained, if it is frozen at first.
            device: device of the numbers that ranks exchange.
        """
        super().__init__(infos, config)
        self.updates = 0
        self.module_grad_norms: dict[str, float] = {}
        self.before_update: Callable[[], None] | None = None
        self.grad_scaler, self.releases = grad_scaler, releases
        self._clip_grads, self._device = clip_grads, device
        self._overlapping = [chunk for chunk in chunks if chunk.ddp_config.overlap_grad_reduce]
        self._updates_before: dict[int, int] = {0: 0}
        for optimizer in self.inner():
            optimizer.grad_scaler = None

    def attach(self, config: TransformerConfig) -> None:
        """Set the schedule's loss scaling, and delay gradient reduction to the last microbatch. `config` is the
        language model's, which drives the schedule."""
        if self.grad_scaler is not None:
            config.grad_scale_func = self.scale_loss
        if self._overlapping:
            config.no_sync_func = self._no_sync

    def step(self) -> tuple[bool, float, int | None]:
        """Clip and update every module, unless a gradient is not finite.

        Returns:
            (True if weights were updated, gradient norm over all modules before clipping, number of zeros in the
            gradient if `config.log_num_zeros_in_grad`, else None). The same on every rank. Without an update the norm
            is inf or nan, and weights and states are unchanged.
        """
        norms, _ = self.reduce_norms()
        self.clip(norms)
        updated = self.update(norms)
        return updated, norms.total, norms.num_zeros if updated else None

    @torch.no_grad()
    def reduce_norms(self, sums: torch.Tensor | None = None) -> tuple[GradNorms, list[float]]:
        """Unscale the gradients, and sum their squares over all ranks in one message. The host waits for one copy in a
        step, which is made here.

        Args:
            sums: numbers on the device, the same on every rank, that share this copy to the host.

        Returns:
            (the norms, `sums` on the host).
        """
        names = sorted(self.module_infos)
        message = self._local_squares(names, self._collect_gradients())
        dist.all_reduce(message)
        host = on_host(message if sums is None else torch.cat([message, sums]))
        *squares, overflows, zeros = host[: len(message)]
        counted = int(zeros) if self.config.log_num_zeros_in_grad and math.isfinite(zeros) else None
        total = math.sqrt(sum(squares))
        if overflows and math.isfinite(total):
            total = math.inf  # loss scaling found a gradient that is not finite
        norms = GradNorms(dict(zip(names, squares, strict=True)), total, counted)
        self.module_grad_norms = {name: math.sqrt(norms.squares[name]) for name in self._clip_grads}
        return norms, host[len(message) :]

    @torch.no_grad()
    def clip(self, norms: GradNorms) -> None:
        """Scale the gradients of every clip group down to its largest norm. Do nothing if a gradient is not finite."""
        if not math.isfinite(norms.total):
            return
        squares = norms.squares
        together = math.sqrt(sum([squares[name] for name, limit in self._clip_grads.items() if limit is None]))
        for name, limit in self._clip_grads.items():
            largest, norm = (self.config.clip_grad, together) if limit is None else (limit, math.sqrt(squares[name]))
            coefficient = largest / (norm + _LEAST_NORM)
            if largest > 0 and coefficient < 1:
                for optimizer in self.inner(self.module_infos[name]):
                    if not optimizer.is_stub_optimizer:
                        optimizer.optimizer.scale_gradients(coefficient)

    @torch.no_grad()
    def update(self, norms: GradNorms) -> bool:
        """Update all weights, and adapt the loss scale of fp16. Return False if a gradient is not finite: weights and
        states are then unchanged."""
        is_finite = math.isfinite(norms.total)
        if self.grad_scaler is not None:
            self.grad_scaler.update(not is_finite)
        if not is_finite:
            return False
        if self.before_update is not None:
            self.before_update()
        self.step_with_ready_grads()
        self.updates += 1
        return True

    def get_loss_scale(self) -> torch.Tensor:
        """Return the factor of losses before backward: 1 except in fp16. Shape [1], on the device."""
        return torch.ones(1, device=self._device) if self.grad_scaler is None else self.grad_scaler.scale

    def release(self, step: int) -> None:
        """Train the parameter groups of this step from now on, as if the optimizer started here. Their moments are
        zero, so Adam's bias correction must count from here."""
        self._updates_before.setdefault(step, self.updates)
        self._set_group_steps()

    def plain_state(self) -> dict[str, Any]:
        """Return the checkpoint state besides master copies and moments, as JSON values; the same on every rank."""
        state: dict[str, Any] = {
            "updates": self.updates,
            "updates_before": sorted(self._updates_before.items()),
        }
        if isinstance(self.grad_scaler, DynamicGradScaler):
            scaler = self.grad_scaler.state_dict()
            state["grad_scaler"] = scaler | {"scale": float(scaler["scale"])}
        return state

    def load_plain_state(self, state: dict[str, Any]) -> None:
        """Load the result of `plain_state`. Learning rate, decay and other settings remain those of the config. Raise
        TypeError or KeyError if `state` is something else."""
        if type(state["updates"]) is not int:
            raise TypeError(f"updates is {state['updates']!r}")
        self.updates, self._updates_before = state["updates"], dict(map(tuple, state["updates_before"]))
        self._set_group_steps()
        if "grad_scaler" in state and isinstance(self.grad_scaler, DynamicGradScaler):
            scale = torch.tensor([state["grad_scaler"]["scale"]], dtype=torch.float, device=self._device)
            self.grad_scaler.load_state_dict(state["grad_scaler"] | {"scale": scale})

    def inner(self, info: ModuleOptimizerInfo | None = None) -> Iterator[MegatronOptimizer]:
        """Yield the optimizers of dense and of expert parameters, of one module or of all."""
        for each in self.module_infos.values() if info is None else (info,):
            if each.optimizer is not None:
                yield from each.optimizer.chained_optimizers

    def _set_group_steps(self) -> None:
        """Set the step counter of each group, which is not counted where a group is empty."""
        for optimizer in self.inner():
            for group in optimizer.param_groups:
                before = self._updates_before.get(group.get(RELEASE, 0))
                group["step"] = 0 if before is None else self.updates - before

    def _collect_gradients(self) -> torch.Tensor:
        """Copy the reduced gradients to the optimizers' parameters, without the loss scale. Return [1], above 0 if a
        gradient of this rank is not finite; only checked with loss scaling."""
        overflow = torch.zeros(1, device=self._device)
        for optimizer in self.inner():
            # The optimizer has no scaler, so this only copies.
            optimizer.prepare_grads()
            for group in optimizer.param_groups:
                group[IS_WAITING] = group.get(RELEASE, 0) not in self._updates_before
                if group[IS_WAITING]:
                    for parameter in group["params"]:
                        parameter.grad = None
            gradients = [parameter.grad for parameter in optimizer.get_parameters() if parameter.grad is not None]
            if self.grad_scaler is not None and gradients:
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, self.grad_scaler.inv_scale)
        return overflow

    def _local_squares(self, names: list[str], overflow: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the message, float64: squared gradient norms of `names`, overflows, zeros if
        counted. Every shard of a gradient counts on one rank. The sum over the world is therefore the square of the
        module's norm, as Megatron-Core sums it over the module's ranks."""
        message = torch.zeros(len(names) + 2, dtype=torch.float64, device=self._device)
        for index, name in enumerate(names):
            info, gradients = self.module_infos[name], []
            for optimizer in self.inner(info):
                # All shards count; gradients that replicas hold whole count on the first replica.
                if not (self.config.use_distributed_optimizer or isinstance(optimizer, ShardOptimizer)):
                    are_experts = any(group["is_expert_parallel"] for group in optimizer.param_groups)
                    if (info.pg_collection.expt_dp if are_experts else info.pg_collection.dp_cp).rank():
                        continue
                gradients += optimizer.get_grads_for_grad_norm()
            if not gradients:
                continue
            message[index] = squares_of(gradients).sum()
            if self.config.log_num_zeros_in_grad:
                message[-1] += sum(gradient.numel() - torch.count_nonzero(gradient) for gradient in gradients)
        message[-2] = overflow[0]
        return message

    @contextmanager
    def _no_sync(self) -> Iterator[None]:
        with ExitStack() as stack:
            for chunk in self._overlapping:
                stack.enter_context(chunk.no_sync())
            yield


class ShardOptimizer(FP32Optimizer):
    """Updates this rank's shards of the parameters of a `ShardedModule`."""


def update_shards(optimizer: ChainedOptimizer, chunk: ShardedModule) -> None:
    """Let Megatron-Core's optimizers of a sharded module update its shards, which are plain tensors. Those without
    elements on this rank are left out."""
    for number, inner in enumerate(optimizer.chained_optimizers):
        for group in inner.param_groups:
            shards = [chunk.shards[parameter] for parameter in group["params"]]
            group["params"] = [shard for shard in shards if shard.numel()]
        sharded = ShardOptimizer(inner.optimizer, inner.config, inner.init_state_fn)
        sharded.tp_group = inner.tp_group
        optimizer.chained_optimizers[number] = sharded


def on_host(numbers: torch.Tensor) -> list[float]:
    """Copy numbers to the host and wait for them: once a step, because updates need finite gradients."""
    return numbers.tolist()
