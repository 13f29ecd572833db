"""From a config to everything the loop needs: processes, groups, model, optimizer, data, loggers, resume."""

import logging
import os
import random
import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from mimo_train.checkpoint import folders
from mimo_train.checkpoint.store import load_checkpoint
from mimo_train.config.compose import to_yaml
from mimo_train.config.schema import ConfigContainer
from mimo_train.diagnose.profiling import StepProfiler
from mimo_train.diagnose.rerun import Rerun
from mimo_train.evaluation.held_out import HeldOut
from mimo_train.launch.processes import is_first_of_node
from mimo_train.metrics import progress as progress_log
from mimo_train.metrics.console import Console
from mimo_train.metrics.metrics_log import build_metrics_log
from mimo_train.metrics.stopwatch import Stopwatch
from mimo_train.model.build import build_model, modules_of
from mimo_train.model.layers import use_transformer_engine
from mimo_train.model.seeds import seed_for
from mimo_train.optim.factory import ModuleSchedulers, build_optimizer
from mimo_train.optim.freeze_stages import FreezeStages, GradientNeeds
from mimo_train.parallel import device as devices
from mimo_train.parallel.bridge.shapes import TokenPlan
from mimo_train.parallel.groups import RunGroups, build_groups
from mimo_train.plan.batch import BatchSizes
from mimo_train.plan.layout import RunLayout
from mimo_train.plan.samples import build_dataset, placeholders_of, tokenizer_of
from mimo_train.step.batches import StepIterator, open_loader
from mimo_train.step.feature_cache import Features
from mimo_train.step.losses import StepLosses
from mimo_train.step.schedule import Pipeline
from mimo_train.step.state import GlobalState


@dataclass
class SetupOutput:
    """What `setup` hands to the loop."""

    model: list
    optimizer: Any
    scheduler: ModuleSchedulers
    train_data_iterator: StepIterator
    held_out: HeldOut | None
    checkpointing_context: dict[str, Any] = field(default_factory=dict)


def start_processes(cfg: ConfigContainer, store: dist.Store | None = None) -> tuple[str, torch.device]:
    """Make this process ready for its device and join the others, over `store` if it is given.

    Returns:
        The kind of device, and the device.
    """
    kind = devices.resolve(cfg.run.device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    device = devices.install(kind, int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
            os.environ.setdefault(name, value)
        devices.init_process_group(kind, cfg.run.timeout_minutes, device, store)
    return kind, device


def build_state(state: GlobalState, kind: str, device: torch.device) -> list:
    """Fill in device, tokenizer, model and pipeline; weights are initial. Collective over all ranks.

    Returns:
        The model chunks of this rank.
    """
    _quieten()
    cfg, layout = state.cfg, state.layout
    groups = build_groups(layout)
    state.kind, state.device, state.tokenizer = kind, device, tokenizer_of(cfg)
    tokenizer = state.tokenizer
    state.stopwatch = Stopwatch(cuda=kind == "cuda")
    state.profiler = StepProfiler(cfg, state.run_dir, kind)
    _seed(cfg, groups)
    model = build_model(
        cfg,
        layout,
        groups,
        vocab_size=tokenizer.vocab_size,
        special_token_ids={name: tokenizer.placeholder_id(token) for name, token in placeholders_of(cfg).items()},
        device=device,
        te=use_transformer_engine(kind),
        pre_wrap_hook=state.pre_wrap_hook,
    )
    _seed(cfg, groups)
    # The schedule reads the language model's config, which a MimoModel has on every rank.
    state.pipeline = Pipeline(layout, groups, model, model[0].config, device, state.stopwatch)
    state.rerun = Rerun(cfg.train.rerun, cfg.train.log_interval)
    state.losses = StepLosses(cfg.train.loss_weights, groups, state.pipeline.step_sum, state.rerun.validate)
    return model


def setup(state: GlobalState, store: dist.Store | None = None) -> SetupOutput:
    """Build a run, or continue it from its newest checkpoint. Collective over all ranks.

    Args:
        state: made from a valid config; filled in here.
        store: where the processes meet, instead of the address in the environment.

    Raises:
        ValueError: data, tokenizer or checkpoint cannot be used; with the config key.
    """
    cfg, layout = state.cfg, state.layout
    kind, device = start_processes(cfg, store)
    make_demo_shards(cfg, layout)
    model = build_state(state, kind, device)
    optimizer = build_optimizer(cfg, model, state.pipeline.groups)
    optimizer.attach(model[0].config)
    needs = GradientNeeds(modules_of(model), optimizer.releases, state.pipeline.groups)
    state.freeze_stages = FreezeStages(cfg, optimizer, partial(_announce_needs, state.pipeline.plan, needs))
    optimizer.passengers = lambda: state.pipeline.step_sum.total("votes")
    state.pipeline.votes_on_host = lambda: optimizer.arrived
    scheduler = ModuleSchedulers(cfg, optimizer)
    dataset = build_dataset(cfg, state.tokenizer)
    context = {"data_fingerprint": dataset.fingerprint}
    folder = folders.chosen(state.run_dir, cfg.checkpoint.resume)
    if folder is not None:
        record = load_checkpoint(folder, layout, model, optimizer, scheduler, state.train_state)
        _require_same_data(record, dataset.fingerprint, folder)
        if record["rerun"] is not None and state.train_state.step + 1 not in cfg.train.skip_iters:
            state.rerun.load_state_dict(record["rerun"])
    elif cfg.checkpoint.weights:
        load_checkpoint(folders.chosen(state.run_dir, cfg.checkpoint.weights, "checkpoint.weights"), layout, model)
        # The optimizer keeps master copies of the weights that it was built with.
        optimizer.reload_model_params()
    _open_logs(state, folder)
    progress = state.train_state
    features = Features(cfg, model, use_transformer_engine(kind))
    features.serve(dataset)
    loader = open_loader(
        cfg,
        layout,
        state.pipeline.groups,
        dataset,
        consumed=progress.consumed_train_samples,
        steps=cfg.train.iters - progress.step,
        size_at=BatchSizes.of(cfg).at,
    )
    iterator = StepIterator(loader, state.pipeline)
    prefetcher = features.prefetcher(iterator)
    if prefetcher is not None:
        state.pipeline.work_ahead(prefetcher.one, prefetcher.all)
    return SetupOutput(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        train_data_iterator=iterator,
        held_out=HeldOut(state, features) if cfg.data.validation_shards else None,
        checkpointing_context=context,
    )


def _announce_needs(plan: TokenPlan, needs: GradientNeeds, step: int) -> None:
    plan.needs = needs.at(step)


def make_demo_shards(cfg: ConfigContainer, layout: RunLayout) -> None:
    """Make the demo shards of `data.demo` if they are not there; the first rank of each node does, the others wait."""
    if not cfg.data.demo:
        return
    from data.demo.make import ensure_demo

    if is_first_of_node(layout, dist.get_rank()):
        ensure_demo(Path(cfg.data.shards).parent, cfg.data.demo)
    dist.barrier()


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


def _require_same_data(record: dict, fingerprint: str, folder: Path) -> None:
    if record["data_fingerprint"] != fingerprint:
        raise ValueError(
            f"data.shards: the shards are not those of checkpoint {folder} (fingerprint {fingerprint}, was "
            f"{record['data_fingerprint']}), so the order of samples would not continue: give the same shards, or "
            "another run.dir"
        )


def _open_logs(state: GlobalState, resumed_from: Path | None) -> None:
    if not state.is_logging_rank:
        return
    cfg, step = state.cfg, state.train_state.step
    state.run_dir.mkdir(parents=True, exist_ok=True)
    (state.run_dir / "config.yaml").write_text(to_yaml(cfg))
    state.metrics = build_metrics_log(cfg, state.run_dir, resumed_step=step)
    state.console = Console(cfg.train.iters, step)
    progress_log.job_started(
        state.run_dir,
        world_size=state.layout.world_size,
        step=step,
        flops=state.train_state.floating_point_operations_so_far,
    )
    if resumed_from is not None:
        state.console.message(f"continues from {resumed_from}, step {step}")


def _quieten() -> None:
    """Megatron-Core warns on import and construction of what this program chose on purpose."""
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
    logging.getLogger("megatron").setLevel(logging.ERROR)
