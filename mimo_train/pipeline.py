"""Communicator, schedule and gradient finalisation for a set of modules: one or many.

Several modules on disjoint ranks run Megatron-Core's 1F1B over `PlannedCommunicator`; modules that share their ranks,
and one module in one stage, run without pipelining; one module in several stages runs 1F1B over Megatron-Core's
`P2PCommunicator`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.module import MegatronModule

from mimo_train.bridge import PlannedCommunicator, TokenPlan
from mimo_train.config import LANGUAGE
from mimo_train.groups import RunGroups
from mimo_train.layout import RunLayout
from mimo_train.model.build import modules_of


class Pipeline:
    """Runs forward and backward of all modules over the microbatches of a step.

    Attributes:
        plan: rows that encoders send per sample; the data sets it before each step.
        step_flags: int64 vector that is summed over ranks at the end of a step, in the message of the token count.
        summed_flags: the sum, after a step.
        exit_requested: asked at the end of a step; whether this rank wants the run to end.
    """

    def __init__(self, layout: RunLayout, groups: RunGroups, model: MegatronModule, config, device: torch.device):
        self.layout, self.groups, self.device = layout, groups, device
        self.plan = TokenPlan()
        self.step_flags = torch.zeros(0, dtype=torch.int64, device=device)
        self.summed_flags: torch.Tensor | None = None
        self.exit_requested: Callable[[], bool] = lambda: False
        self._exit_votes = torch.zeros((), dtype=torch.int64, device=device)
        self._modules = modules_of(model)
        self._choose_schedule(config)
        config.finalize_model_grads_func = self._finalize

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss: the language model's last stage."""
        pgs = self.groups.collections.get(LANGUAGE)
        return pgs is not None and pgs.pp.rank() == pgs.pp.size() - 1

    @property
    def is_logging_rank(self) -> bool:
        """Whether this is the one rank that writes the log."""
        return dist.get_rank() == self.layout.logging_rank

    def run(
        self,
        forward_step: Callable,
        data_iterator: Any,
        model: list[MegatronModule],
        *,
        sequence_length: int,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
    ) -> list[Any]:
        """Run one step's microbatches; gradients stand summed over ranks and divided by tokens afterwards.

        Returns:
            What the loss function reported for each microbatch, on ranks of the last stage; else an empty list.
        """
        return self._schedule(
            forward_step_func=forward_step,
            data_iterator=data_iterator,
            model=model,
            num_microbatches=self.layout.num_microbatches,
            seq_length=sequence_length,
            micro_batch_size=self.layout.micro_batch_size,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            p2p_communicator=self._communicator,
            pg_collection=self._schedule_groups,
        )

    def exit_agreed(self) -> bool:
        """Whether any rank wanted the run to end, as of the last step; the same answer on every rank."""
        return bool(self._exit_votes.item())

    def _choose_schedule(self, config) -> None:
        layout, groups = self.layout, self.groups
        several = len(layout.modules) > 1
        if several and not layout.shared and layout.world_size > 1:
            self._communicator = PlannedCommunicator(layout, groups.grids, config, self.plan, self.device)
            self._schedule = schedules.forward_backward_pipelining_without_interleaving
            self._schedule_groups = groups.multi_module
            return
        self._schedule_groups = groups.collections[LANGUAGE]
        if layout.language.pp > 1:
            self._communicator = P2PCommunicator(pp_group=self._schedule_groups.pp, config=config)
            self._schedule = schedules.forward_backward_pipelining_without_interleaving
        else:
            self._communicator = None
            self._schedule = schedules.forward_backward_no_pipelining

    def _finalize(self, _model, num_tokens=None, pg_collection=None, force_all_reduce=False) -> None:
        """Reduce every module's gradients over its own groups, then divide by the tokens of the global batch.

        Called by the schedule after the last backward. Only the language model's last stage counts tokens; one sum
        over all ranks gives every module the same divisor, at any pair of data-parallel sizes.
        """
        for name, module in self._modules.items():
            finalize_model_grads([module], None, self.groups.collections[name], force_all_reduce)
        tokens = self._sum_over_ranks(num_tokens).clamp(min=1)
        for module in self._modules.values():
            module.scale_gradients(1.0 / tokens.to(torch.float32))

    def _sum_over_ranks(self, num_tokens: torch.Tensor) -> torch.Tensor:
        """Tokens of the global batch; the step's flags and the wish to exit travel in the same message."""
        pgs = self.groups.collections.get(LANGUAGE)
        message = torch.zeros(2 + self.step_flags.numel(), dtype=torch.int64, device=self.device)
        if self.is_last_stage and pgs.tp.rank() == 0:
            message[0] = num_tokens
        message[1] = int(self.exit_requested())
        message[2:] = self.step_flags
        dist.all_reduce(message)
        self._exit_votes, self.summed_flags = message[1], message[2:]
        return message[0]
