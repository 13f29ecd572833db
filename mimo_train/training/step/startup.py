"""Build the parts of a run that a forward pass needs, on this rank: processes, groups, model and pipeline."""

import os
import random
from collections.abc import Set
from dataclasses import dataclass

import numpy
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from data.text.tokens import Tokenizer
from mimo_train.config.errors import ConfigError
from mimo_train.config.schema import ConfigContainer
from mimo_train.estimate.parameters import vocabulary_faults
from mimo_train.flight.recorder import RECORDER
from mimo_train.inputs.datasets import placeholders_of, tokenizer_of
from mimo_train.layout.run import Run
from mimo_train.logging.rank_log import show
from mimo_train.logging.stopwatch import Stopwatch
from mimo_train.models.build import build_model
from mimo_train.models.heads import ModelHook
from mimo_train.models.layers import use_transformer_engine
from mimo_train.models.parameters import seed_for
from mimo_train.parallel import device as devices
from mimo_train.parallel.collectives import record_messages, return_at_once
from mimo_train.parallel.groups import RunGroups, build_groups
from mimo_train.training.step.schedule import Pipeline


@dataclass(frozen=True)
class Parts:
    """The parts of a run that a forward pass needs, without an optimizer."""

    tokenizer: Tokenizer
    pipeline: Pipeline
    """Has the model, the process groups and the device."""
    stopwatch: Stopwatch


def start_processes(cfg: ConfigContainer, store: dist.Store | None = None) -> tuple[str, torch.device]:
    """Join the other processes, over `store` if given; returns (kind of device, device)."""
    chosen = devices.choose(cfg.run.device, *(int(os.environ.get(*each)) for each in _OF_THIS_MACHINE))
    kind = chosen.kind
    device = devices.install(chosen.kind, chosen.index, cpu_kernels=cfg.run.cpu_kernels)
    _remark(cfg, chosen)
    record_messages()
    return_at_once()
    if kind == "cuda":
        RECORDER.queued()
    if not dist.is_initialized():
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
            os.environ.setdefault(name, value)
        if store is None and os.environ["WORLD_SIZE"] == "1":
            # A single process joins nobody: do not wait for an address left in the environment.
            store = dist.HashStore()
        RECORDER.to("join")
        devices.init_process_group(kind, cfg.run.timeout_minutes, store)
    return kind, device


_OF_THIS_MACHINE = (("LOCAL_WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))


def _remark(cfg: ConfigContainer, chosen: devices.Choice) -> None:
    if os.environ.get("RANK", "0") != "0":
        return
    overlaps = any(module.layout.tp * module.layout.cp > 1 for module in cfg.modules.values())
    for remark in devices.remarks(overlaps) if chosen.kind == "cuda" else filter(None, [chosen.remark]):
        show(remark)


def build_parts(
    run: Run,
    kind: str,
    device: torch.device,
    pre_wrap_hook: ModelHook | None = None,
    *,
    undrawn: Set[tuple[str, str]] = frozenset(),
) -> Parts:
    """Build groups, model and pipeline; initial weights are drawn, except `undrawn` ones. Collective."""
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
    _seed(cfg, groups)
    stopwatch = Stopwatch(cuda=kind == "cuda")
    return Parts(tokenizer, Pipeline(run, groups, model, device, stopwatch), stopwatch)


def _seed(cfg: ConfigContainer, groups: RunGroups) -> None:
    """Seed every generator: dropout differs between data- and context-parallel ranks, stages and modules."""
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
