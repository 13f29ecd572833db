"""Communicator, schedule and gradient finalisation for a set of modules: one or many.

Where an encoder stands apart from the language model, or the language model has several stages besides encoders,
Megatron-Core's 1F1B runs over `PlannedCommunicator`. Encoders on the ranks of a language model of one stage, and one
module in one stage, run without pipelining; one module in several stages runs 1F1B over Megatron-Core's
`P2PCommunicator`, interleaved if each stage has several model chunks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.multimodule_communicator import MultiModulePipelineCommunicator
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from mimo_train.config.schema import LANGUAGE
from mimo_train.model.build import modules_of
from mimo_train.model.mimo import MegatronMimoModel
from mimo_train.model.moe import Balancing
from mimo_train.parallel.bridge.communicator import MegatronCommunicator, PlannedCommunicator, TimedP2PCommunicator
from mimo_train.parallel.bridge.exchange import LocalBridge, Watch, not_timed
from mimo_train.parallel.bridge.megatron import MegatronSizes
from mimo_train.parallel.bridge.shapes import TokenPlan
from mimo_train.parallel.groups import RunGroups
from mimo_train.parallel.step_sum import StepSum
from mimo_train.plan.layout import RunLayout

VOTES = 2
"""Booleans that a rank votes on at the end of each step: it received a signal; its time is over."""


class Pipeline:
    """Runs forward and backward of all modules over the microbatches of a step.

    Attributes:
        plan: rows that encoders send per sample; the data sets it before each step.
        step_sum: what ranks sum at the end of backward, in one message: tokens, votes and what others open there.
        votes: asked at the end of a step for `VOTES` booleans of this rank.
        votes_on_host: gives the sum of the votes over ranks, from where it comes to the host with other numbers.
        is_last_stage: whether this rank computes the loss: the language model's last stage.
        balancing: weight and value of the load-balancing loss of experts.
        stopwatch: takes the time that this rank waits for others.
    """

    def __init__(
        self,
        layout: RunLayout,
        groups: RunGroups,
        model: list[MegatronModule],
        config,
        device: torch.device,
        stopwatch: Watch = not_timed,
    ):
        self.layout, self.groups, self.device = layout, groups, device
        self.stopwatch = stopwatch
        self.plan = TokenPlan()
        self.votes_on_host: Callable[[], Sequence[float]] = lambda: ()
        self.votes: Callable[[], Sequence[bool]] = lambda: (False,) * VOTES
        language = groups.collections.get(LANGUAGE)
        self.is_last_stage = language is not None and language.pp.rank() == language.pp.size() - 1
        self._counts_tokens = self.is_last_stage and language.tp.rank() == 0
        self._num_tokens: torch.Tensor | None = None
        self._when_done: Callable[[], None] = lambda: None
        self._megatron_sizes: MegatronSizes | None = None
        self.step_sum = StepSum(device)
        self.step_sum.open("tokens", 1, self._own_tokens)
        self.step_sum.open("votes", VOTES, lambda: self.votes())
        self.balancing = Balancing(config, layout.language.dp, self.step_sum, device)
        self._modules = modules_of(model)
        self._choose_schedule(model[0], config)
        config.finalize_model_grads_func = self._finalize

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
        num_microbatches: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
    ) -> list[Any]:
        """Run one step's microbatches; gradients stand summed over ranks and divided by tokens afterwards.

        Args:
            num_microbatches: that `data_iterator` gives; default: those of a full batch.

        Returns:
            What the loss function reported for each microbatch, on ranks of the last stage; else an empty list.
        """
        if len(model) > 1:
            data_iterator = data_iterator.views(len(model))
        num_microbatches = num_microbatches or self.layout.num_microbatches
        if self._megatron_sizes:
            self._megatron_sizes.require_possible()
        if not forward_only:
            self.balancing.begin(num_microbatches)
        return self._schedule(
            forward_step_func=forward_step,
            data_iterator=data_iterator,
            model=model,
            num_microbatches=num_microbatches,
            seq_length=sequence_length,
            micro_batch_size=self.layout.micro_batch_size,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            p2p_communicator=self._communicator,
            pg_collection=self._schedule_groups,
        )

    def work_ahead(self, while_waiting: Callable[[], None], when_done: Callable[[], None]) -> None:
        """Use the time in which this rank waits for the language model on other ranks.

        Args:
            while_waiting: called in every exchange with it.
            when_done: called when this rank has done its part of a step.
        """
        for bridge in self._communicator.bridge_comms if self.layout.apart_encoders else ():
            bridge.while_waiting = while_waiting
        self._when_done = when_done

    def agreed_votes(self) -> tuple[bool, ...]:
        """Which votes any rank has cast, as of the last step; the same answer on every rank."""
        return tuple(bool(vote) for vote in self.votes_on_host()) or (False,) * VOTES

    def _choose_schedule(self, model: MegatronModule, config) -> None:
        layout, groups = self.layout, self.groups
        self._communicator, self._schedule = None, schedules.forward_backward_no_pipelining
        self._schedule_groups = groups.collections.get(LANGUAGE)
        if isinstance(model, MimoModel):
            self._connect(model, config)
        if layout.apart_encoders or (layout.local_encoders and layout.language.pp > 1):
            self._communicator = self._communicator_of(model, config)
            self._schedule = schedules.forward_backward_pipelining_without_interleaving
            self._schedule_groups = groups.multi_module
        elif layout.language.pp > 1:
            self._communicator = TimedP2PCommunicator(self._schedule_groups.pp, config, self.stopwatch)
            self._schedule = (
                schedules.forward_backward_pipelining_with_interleaving
                if layout.language.vpp > 1
                else schedules.forward_backward_pipelining_without_interleaving
            )

    def _connect(self, model: MimoModel, config) -> None:
        """Give the model its bridges from encoders on the language model's ranks, or what Megatron-Core's need."""
        layout, plan = self.layout, self.plan
        if isinstance(model, MegatronMimoModel):
            self._megatron_sizes = model.sizes = MegatronSizes(layout, plan)
            return
        model.plan = plan
        model.local_bridges = {
            name: LocalBridge(
                name, layout, plan, config.hidden_size, config.pipeline_dtype, self.device, self.stopwatch
            )
            for name in layout.local_encoders
            if name in self._modules
        }

    def _communicator_of(self, model: MimoModel, config) -> MultiModulePipelineCommunicator:
        """What carries features and activations between the steps of the schedule."""
        layout, grids = self.layout, self.groups.grids
        if self._megatron_sizes:
            return MegatronCommunicator(layout, grids, config, self.stopwatch)
        hidden_sizes = {LANGUAGE: config.hidden_size} | {
            name: unwrap_model(submodule).encoders[name].config.hidden_size
            for name, submodule in model.modality_submodules.items()
        }
        sequence_length = model.mimo_config.language_model_spec.params["max_sequence_length"]
        return PlannedCommunicator(
            layout, grids, config, hidden_sizes, sequence_length, self.plan, self.device, self.stopwatch
        )

    def _finalize(self, _model, num_tokens=None, pg_collection=None, force_all_reduce=False) -> None:
        """Reduce every module's gradients over its own groups, then divide by the tokens of the global batch.

        Called by the schedule after the last backward. Only the language model's last stage counts tokens; one sum
        over all ranks gives every module the same divisor, at any pair of data-parallel sizes.
        """
        self._num_tokens = num_tokens
        self._when_done()
        with self.stopwatch("reduce"):
            for name, chunks in self._modules.items():
                finalize_model_grads(chunks, None, self.groups.collections[name], force_all_reduce)
            self.step_sum.reduce()
        tokens = self.step_sum.total("tokens").clamp(min=1).to(torch.float32)
        for chunks in self._modules.values():
            for chunk in chunks:
                chunk.scale_gradients(1.0 / tokens)

    def _own_tokens(self) -> torch.Tensor | None:
        """Tokens that this rank counted; one rank of each tensor-parallel group counts."""
        return self._num_tokens if self._counts_tokens else None
