"""Communicator, schedule and gradient finalisation for one module or many.

Megatron-Core's 1F1B runs over `ModuleCommunicator` if modules have their own ranks or a destination has several stages.
It runs over `P2PCommunicator` for one module in several stages, interleaved with several model chunks per stage. All
else runs without pipelining: one module in one stage, and sources on the ranks of a destination of one stage.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.multimodule_communicator import MultiModulePipelineCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model

from mimo_train.config.parts import LANGUAGE
from mimo_train.layout.kernels import has_fp8
from mimo_train.layout.run import Run
from mimo_train.models.experts import RouterLosses
from mimo_train.models.fp8 import renew_copies
from mimo_train.models.parameters import modules_of
from mimo_train.parallel.bridge.communicator import (
    ModuleCommunicator,
    TextShapes,
    TimedP2PCommunicator,
)
from mimo_train.parallel.bridge.exchange import SharedBridge, Watch, not_timed
from mimo_train.parallel.bridge.shapes import StepShapes, features_width
from mimo_train.parallel.groups import RunGroups


class Pipeline:
    """Runs forward and backward of all modules over the microbatches of a step.

    Attributes:
        shapes: rows that sources send per sample, and rows of text; set by the data before each step.
        is_last_stage: True if this rank has the language model's last stage, which computes the loss.
        router_losses: weights and values of the load-balancing loss and the z-loss of experts.
        stopwatch: measures the time that this rank waits for others.
    """

    def __init__(
        self,
        run: Run,
        groups: RunGroups,
        model: list[MegatronModule],
        device: torch.device,
        stopwatch: Watch = not_timed,
    ):
        self.layout, self.batch, self.groups, self.model, self.device = run.layout, run.batch, groups, model, device
        self.stopwatch, self.shapes = stopwatch, StepShapes()
        self._run = run
        language = groups.collections.get(LANGUAGE)
        self.is_last_stage = self._counts_tokens = False
        if language is not None:
            self.is_last_stage = language.pp.rank() == language.pp.size() - 1
            self._counts_tokens = self.is_last_stage and language.tp.rank() == 0
        self._num_tokens: torch.Tensor | None = None
        self._when_done: Callable[[], None] = lambda: None
        # The schedule reads the language model's config, which a MimoModel has on every rank.
        config = model[0].config
        self.router_losses = RouterLosses(
            config, run.layout.language, device, per_layer="router_losses_per_layer" in run.cfg.log.metrics
        )
        self._modules = modules_of(model)
        in_fp8 = has_fp8(run.cfg)
        self._with_copies = [chunk for name, chunks in self._modules.items() if name in in_fp8 for chunk in chunks]
        self._choose_schedule(model[0], config)
        config.finalize_model_grads_func = self._finalize

    def run(
        self,
        forward_step: Callable,
        data_iterator: Any,
        *,
        num_microbatches: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
    ) -> list[Any]:
        """Run one step's microbatches. Gradients are summed over the ranks of each module; `divide_gradients` follows.

        Args:
            num_microbatches: number of microbatches in `data_iterator`; default: those of the current step of a
                `StepIterator`, or of a full batch.

        Returns:
            The loss function's report for each microbatch, on ranks of the last stage; else an empty list.
        """
        if len(self.model) > 1:
            data_iterator = data_iterator.views(len(self.model))
        renew_copies(self._with_copies)
        num_microbatches = num_microbatches or len(self.shapes.texts) or self.batch.num_microbatches
        if not forward_only:
            self.router_losses.begin(num_microbatches)
        return self._schedule(
            forward_step_func=forward_step,
            data_iterator=data_iterator,
            model=self.model,
            num_microbatches=num_microbatches,
            seq_length=self._run.cfg.data.sequence_length,
            micro_batch_size=self.batch.micro_batch_size,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
            p2p_communicator=self._communicator,
            pg_collection=self._schedule_groups,
        )

    def work_ahead(self, while_waiting: Callable[[], None], when_done: Callable[[], None]) -> None:
        """Call `while_waiting` in exchanges with other ranks' modules, `when_done` after this rank's part of a step."""
        if self.layout.disjoint_edges:
            assert self._communicator is not None, "modules on other ranks are reached by a communicator"
            for bridge in self._communicator.bridge_comms:
                bridge.while_waiting = while_waiting
        self._when_done = when_done

    def local_tokens(self) -> torch.Tensor | None:
        """Return the tokens that this rank counted in the step; one rank of each tensor-parallel group counts."""
        return self._num_tokens if self._counts_tokens else None

    def divide_gradients(self, tokens: torch.Tensor) -> None:
        """Divide all modules' gradients by the tokens of the global batch: `local_tokens` summed over all ranks,
        [1]."""
        factor = 1.0 / tokens.clamp(min=1).to(torch.float32)
        for chunks in self._modules.values():
            for chunk in chunks:
                chunk.scale_gradients(factor)

    def _choose_schedule(self, model: MegatronModule, config: TransformerConfig) -> None:
        layout, groups = self.layout, self.groups
        self._communicator: MultiModulePipelineCommunicator | TimedP2PCommunicator | None = None
        self._schedule = schedules.forward_backward_no_pipelining
        self._schedule_groups = groups.collections.get(LANGUAGE)
        if isinstance(model, MimoModel):
            self._connect(model, config)
        piped = layout.piped_modules
        if len(piped) > 1 or (layout.shared_edges and layout.modules[piped[0]].pp > 1):
            self._communicator = self._communicator_of(model, config)
            self._schedule = schedules.forward_backward_pipelining_without_interleaving
            self._schedule_groups = groups.multi_module
        elif layout.language.pp > 1:
            pgs = groups.collections[LANGUAGE]
            texts = TextShapes(
                layout.language,
                pgs.dp.rank(),
                pgs.pp.rank(),
                config.hidden_size,
                self.shapes,
                config.microbatch_group_size_per_vp_stage,
            )
            self._communicator = TimedP2PCommunicator(pgs.pp, config, self.stopwatch, rows=texts)
            self._schedule = (
                schedules.forward_backward_pipelining_with_interleaving
                if layout.language.vpp > 1
                else schedules.forward_backward_pipelining_without_interleaving
            )

    def _connect(self, model: MimoModel, config: TransformerConfig) -> None:
        widths = self._hidden_sizes(model, config)
        model.shapes = self.shapes
        model.shared_bridges = {
            edge.source: SharedBridge(
                edge,
                self._run,
                self.shapes,
                features_width(self._run, edge.source, widths[edge.destination]),
                config.pipeline_dtype,
                self.device,
                self.groups.bridges.get(edge),
                self.stopwatch,
            )
            for edge in self.layout.shared_edges
            if edge.source in self._modules
        }

    def _communicator_of(self, model: MimoModel, config: TransformerConfig) -> MultiModulePipelineCommunicator:
        return ModuleCommunicator(
            self._run,
            self.groups,
            config,
            self._hidden_sizes(model, config),
            self.shapes,
            self.device,
            self.stopwatch,
        )

    def _hidden_sizes(self, model: MimoModel, config: TransformerConfig) -> dict[str, int]:
        return {LANGUAGE: config.hidden_size} | {
            name: unwrap_model(submodule).encoders[name].config.hidden_size
            for name, submodule in model.modality_submodules.items()
        }

    def _finalize(
        self,
        _model: list[MegatronModule],
        num_tokens: torch.Tensor | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        force_all_reduce: bool = False,
    ) -> None:
        """Sum every module's gradients over its own groups; the schedule calls it after the last backward."""
        self._num_tokens = num_tokens
        self._when_done()
        with self.stopwatch("reduce"):
            for name, chunks in self._modules.items():
                finalize_model_grads(chunks, None, self.groups.collections[name], force_all_reduce)
