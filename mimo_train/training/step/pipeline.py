"""Processes, groups, model and pipeline of a run: what a forward and backward pass needs, without an optimizer.

Megatron-Core's 1F1B runs over `ModuleCommunicator` if modules have their own ranks or a destination has several stages.
It runs over `P2PCommunicator` for one module in several stages, and for interleaved stages of several model chunks,
whose first chunk calls encoders and bridges itself. All else runs without pipelining: one module in one stage, and
sources on the ranks of a destination of one stage.
"""

import os
import random
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model

from data.text.tokens import Tokenizer
from mimo_train.config.errors import ConfigError
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.estimate.parameters import vocabulary_faults
from mimo_train.flight.recorder import RECORDER
from mimo_train.inputs.datasets import placeholders_of, tokenizer_of
from mimo_train.layout.kernels import has_fp8
from mimo_train.layout.placement import Edge
from mimo_train.layout.run import Run
from mimo_train.logging.rank_log import show
from mimo_train.logging.stopwatch import Stopwatch
from mimo_train.models.blocks.delta.module import DeltaNet, fallback_reason
from mimo_train.models.build import build_model
from mimo_train.models.fp8 import renew_copies
from mimo_train.models.heads import ModelHook
from mimo_train.models.layers import use_transformer_engine
from mimo_train.models.mimo import PlacedMimoModel
from mimo_train.models.parameters import modules_of, seed_for
from mimo_train.models.router_losses import RouterLosses
from mimo_train.models.transformer_config import language_config
from mimo_train.parallel import device as devices
from mimo_train.parallel.bridge.communicator import ModuleCommunicator, TextShapes, TimedP2PCommunicator
from mimo_train.parallel.bridge.exchange import DisjointBridge, SharedBridge, Watch, not_timed
from mimo_train.parallel.bridge.interleaved import InterleavedBridge
from mimo_train.parallel.bridge.shapes import StepShapes, features_width
from mimo_train.parallel.collectives import record_messages, return_at_once
from mimo_train.parallel.groups import RunGroups, build_groups


class Pipeline:
    """Runs forward and backward of all modules over the microbatches of a step.

    Attributes:
        chunks: this rank's wrapped chunks of all modules.
        shapes: rows that sources send per sample, and rows of text; set by the data before each step.
        is_last_stage: True if this rank has the language model's last stage, which computes the loss.
        router_losses: weights and values of the load-balancing loss and the z-loss of experts.
        balances_experts: True if these losses, or a class of transformers, need to know which tokens are padding.
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
        self.stopwatch, self.shapes, self._run = stopwatch, StepShapes(), run
        language = groups.collections.get(LANGUAGE)
        self.is_last_stage = language is not None and language.pp.rank() == language.pp.size() - 1
        self._when_done: Callable[[], None] | None = None
        # The schedule reads the language model's config, which a MimoModel has on every rank.
        config = model[0].config if model else language_config(run.cfg, run.layout)
        self.router_losses = RouterLosses(
            config, run.layout.language, device, per_layer="router_losses_per_layer" in run.cfg.log.metrics
        )
        self.balances_experts = self.router_losses.active or getattr(run.cfg.llm, "is_balanced", False)
        self._modules = modules_of(model)
        self.chunks: list[DistributedDataParallel] = [chunk for chunks in self._modules.values() for chunk in chunks]
        in_fp8 = has_fp8(run.cfg)
        self._with_copies = [chunk for name, chunks in self._modules.items() if name in in_fp8 for chunk in chunks]
        self._disjoint_bridges: list[DisjointBridge] = []
        if model:
            self._choose_schedule(model, config)
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
            The loss function's report for each microbatch, on ranks of the last stage; else an empty list. A rank
            without a module does nothing.
        """
        if not self.model:
            if self._when_done is not None:
                self._when_done()
            return []
        if len(self.model) > 1:
            data_iterator = data_iterator.views(len(self.model))
        if self._with_copies:
            renew_copies(self._with_copies)
        num_microbatches = num_microbatches or len(self.shapes.texts) or self.batch.num_microbatches
        if not forward_only:
            self.router_losses.microbatches = num_microbatches
        for bridge in self._disjoint_bridges:
            bridge.begin(num_microbatches, forward_only)
        reports = self._schedule(
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
        for bridge in self._disjoint_bridges:
            bridge.finish()
        return reports

    def work_ahead(self, while_waiting: Callable[[], None], when_done: Callable[[], None]) -> None:
        """Call `while_waiting` in exchanges with other ranks' modules, `when_done` after this rank's part of a step."""
        for bridge in self._disjoint_bridges:
            bridge.while_waiting = while_waiting
        self._when_done = when_done

    def _choose_schedule(self, model: list[MegatronModule], config: TransformerConfig) -> None:
        layout, groups = self.layout, self.groups
        self._communicator: ModuleCommunicator | TimedP2PCommunicator | None = None
        self._schedule = schedules.forward_backward_no_pipelining
        self._schedule_groups = groups.collections.get(LANGUAGE)
        widths, interleaves = {LANGUAGE: config.hidden_size}, layout.language.vpp > 1
        kind = InterleavedBridge if interleaves else DisjointBridge
        self._disjoint_bridges = [
            kind(edge, groups.grids, *self._bridge_options(edge, config)) for edge in layout.disjoint_edges
        ]
        for chunk in model:
            if isinstance(chunk, PlacedMimoModel):
                self._attach_bridges(chunk, config)
                for name, submodule in chunk.modality_submodules.items():
                    widths[name] = unwrap_model(submodule).encoders[name].config.hidden_size
        piped = layout.piped_modules
        has_stages = len(piped) > 1 or (layout.shared_edges and layout.modules[piped[0]].pp > 1)
        if has_stages and not (interleaves and LANGUAGE in self._modules):
            self._communicator = ModuleCommunicator(
                self._run, groups, config, widths, self.shapes, self._disjoint_bridges, self.stopwatch
            )
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
                if interleaves
                else schedules.forward_backward_pipelining_without_interleaving
            )

    def _bridge_options(self, edge: Edge, config: TransformerConfig) -> tuple[Any, ...]:
        """Return the arguments of a bridge after the edge."""
        width = features_width(self._run, edge.source, config.hidden_size)
        group = self.groups.bridges.get(edge)
        return self._run, self.shapes, width, config.pipeline_dtype, self.device, group, self.stopwatch

    def _attach_bridges(self, chunk: PlacedMimoModel, config: TransformerConfig) -> None:
        """Give a model chunk the step's shapes, and the bridges that it calls."""
        chunk.shapes, shared = self.shapes, self.layout.shared_edges
        chunk.shared_bridges = {
            edge.source: SharedBridge(edge, *self._bridge_options(edge, config))
            for edge in shared
            if edge.source in chunk.modality_submodules
        }
        bridges = self._disjoint_bridges
        chunk.interleaved_bridges = [bridge for bridge in bridges if isinstance(bridge, InterleavedBridge)]

    def _finalize(self, *_arguments: Any, force_all_reduce: bool = False, **_options: Any) -> None:
        """Sum every module's gradients over its own groups; the schedule calls it after the last backward."""
        if self._when_done is not None:
            self._when_done()
        with self.stopwatch("reduce"):
            for name, chunks in self._modules.items():
                finalize_model_grads(chunks, None, self.groups.collections[name], force_all_reduce)


@dataclass(frozen=True)
class Parts:
    """The parts of a run that a forward pass needs, without an optimizer."""

    tokenizer: Tokenizer
    pipeline: Pipeline
    """Has the model, the process groups and the device."""
    stopwatch: Stopwatch


def start_processes(cfg: ConfigContainer, store: dist.Store | None = None) -> tuple[str, torch.device]:
    """Join the other processes, over `store` if given; returns (kind of device, device)."""
    environment = os.environ
    chosen = devices.choose(
        cfg.run.device, int(environment.get("LOCAL_WORLD_SIZE", "1")), int(environment.get("LOCAL_RANK", "0"))
    )
    device = devices.install(chosen.kind, chosen.index, cpu_kernels=cfg.run.cpu_kernels)
    if environment.get("RANK", "0") == "0":
        overlaps = any(module.layout.tp * module.layout.cp > 1 for module in cfg.modules.values())
        for remark in devices.remarks(overlaps) if chosen.kind == "cuda" else filter(None, [chosen.remark]):
            show(remark)
    record_messages()
    return_at_once()
    if chosen.kind == "cuda":
        RECORDER.queued()
    if not dist.is_initialized():
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
            environment.setdefault(name, value)
        if store is None and environment["WORLD_SIZE"] == "1":
            # A single process joins nobody: do not wait for an address left in the environment.
            store = dist.HashStore()
        RECORDER.to("join")
        devices.init_process_group(chosen.kind, cfg.run.timeout_minutes, store)
    return chosen.kind, device


def build_parts(
    run: Run,
    kind: str,
    device: torch.device,
    pre_wrap_hook: ModelHook | None = None,
    *,
    undrawn: Set[tuple[str, str]] = frozenset(),
) -> Parts:
    """Build groups, model and pipeline; initial weights are drawn, except `undrawn` ones. Collective. Raises
    ConfigError if the vocabulary does not fit the tokenizer."""
    RECORDER.to("groups")
    cfg, groups, tokenizer = run.cfg, build_groups(run.layout, run.cfg.run.timeout_minutes), tokenizer_of(run.cfg)
    if faults := list(vocabulary_faults(cfg.llm, tokenizer.text_size)):
        raise ConfigError(faults)
    _seed(cfg, groups)
    RECORDER.to("model")
    model = build_model(
        cfg,
        run.layout,
        groups,
        vocab_size=tokenizer.vocab_size,
        special_token_ids={name: tokenizer.placeholder_id(token) for name, token in placeholders_of(cfg).items()},
        device=device,
        te=use_transformer_engine(kind),
        pre_wrap_hook=pre_wrap_hook,
        undrawn=undrawn,
    )
    has_delta = any(isinstance(part, DeltaNet) for chunk in model for part in chunk.modules())
    if kind == "cuda" and has_delta and dist.get_rank() == 0 and fallback_reason():
        show(f"torch computes Gated DeltaNet, which is slower: {fallback_reason()}")
    for part in (part for chunk in model for part in chunk.modules()):
        if remark := getattr(part, "remark", ""):
            show(remark)
    _seed(cfg, groups)
    stopwatch = Stopwatch(cuda=kind == "cuda")
    return Parts(tokenizer, Pipeline(run, groups, model, device, stopwatch), stopwatch)


def _seed(cfg: ConfigContainer, groups: RunGroups) -> None:
    """Seed every generator: dropout differs between data- and context-parallel ranks, stages and modules."""
    if not groups.collections:
        return
    name, pgs = next(iter(groups.collections.items()))
    place = (name, pgs.dp.rank(), pgs.pp.rank(), *([pgs.cp.rank()] if pgs.cp.size() > 1 else []))
    seed = seed_for(cfg.run.seed, "rank", *place) % 2**31
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(
        seed,
        force_reset_rng=True,
        tp_rank=pgs.tp.rank(),
        ep_rank=pgs.ep.rank(),
        etp_rank=pgs.expt_tp.rank(),
    )
