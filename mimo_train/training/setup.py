"""From a config to everything the loop needs: processes, groups, model, optimizer, data, loggers, resume."""

import logging
import os
import random
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from mimo_train import device as devices
from mimo_train.checkpoint import folders
from mimo_train.checkpoint.store import load_checkpoint
from mimo_train.compose import to_yaml
from mimo_train.config import ConfigContainer
from mimo_train.groups import RunGroups, build_groups
from mimo_train.layout import RunLayout
from mimo_train.metrics import progress as progress_log
from mimo_train.metrics.console import Console
from mimo_train.metrics.log import build_metrics_log
from mimo_train.model.build import build_model
from mimo_train.model.layers import seed_for, use_transformer_engine
from mimo_train.optim.build import ModuleSchedulers, build_optimizer
from mimo_train.pipeline import Pipeline
from mimo_train.samples import build_dataset, tokenizer_of
from mimo_train.training.data import StepIterator, open_loader
from mimo_train.training.evaluate import HeldOut
from mimo_train.training.state import GlobalState


@dataclass
class SetupOutput:
    """What `setup` hands to the loop."""

    state: GlobalState
    model: list
    optimizer: Any
    scheduler: ModuleSchedulers
    train_data_iterator: StepIterator
    held_out: HeldOut | None
    checkpointing_context: dict[str, Any] = field(default_factory=dict)


def start_processes(cfg: ConfigContainer) -> tuple[str, torch.device]:
    """Make this process ready for its device and join the others. Returns the kind of device, and the device."""
    kind = devices.resolve(cfg.run.device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    device = devices.install(kind, int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
            os.environ.setdefault(name, value)
        devices.init_process_group(kind, cfg.run.timeout_minutes, device)
    return kind, device


def build_state(cfg: ConfigContainer, layout: RunLayout, kind: str, device: torch.device) -> tuple[GlobalState, list]:
    """The state with model and pipeline; weights are initial. Collective over all ranks."""
    _quieten()
    groups = build_groups(layout)
    tokenizer = tokenizer_of(cfg)
    state = GlobalState(cfg, layout, Path(cfg.run.dir), kind, device, tokenizer)
    _seed(cfg, groups)
    model = build_model(
        cfg,
        layout,
        groups,
        vocab_size=tokenizer.vocab_size,
        special_token_ids={
            name: tokenizer.placeholder_id(module.encoder.placeholder) for name, module in cfg.encoders.items()
        },
        device=device,
        te=use_transformer_engine(kind),
    )
    _seed(cfg, groups)
    # The schedule reads the language model's config, which a MimoModel has on every rank.
    state.pipeline = Pipeline(layout, groups, model, model.config, device)
    return state, [model]


def setup(cfg: ConfigContainer, layout: RunLayout) -> SetupOutput:
    """Build a run, or continue it from its newest checkpoint. Collective over all ranks.

    Raises:
        ValueError: data, tokenizer or checkpoint cannot be used; with the config key.
    """
    kind, device = start_processes(cfg)
    make_demo_shards(cfg)
    state, model = build_state(cfg, layout, kind, device)
    optimizer = build_optimizer(cfg, model[0], state.pipeline.groups)
    scheduler = ModuleSchedulers(cfg, optimizer)
    dataset = build_dataset(cfg, state.tokenizer)
    context = {"data_fingerprint": dataset.fingerprint}
    folder = folders.chosen(state.run_dir, cfg.checkpoint.resume)
    if folder is not None:
        record = load_checkpoint(folder, layout, model[0], optimizer, scheduler, state.train_state)
        _require_same_data(record, dataset.fingerprint, folder)
    elif cfg.checkpoint.weights:
        load_checkpoint(folders.chosen(state.run_dir, cfg.checkpoint.weights, "checkpoint.weights"), layout, model[0])
        # The optimizer keeps master copies of the weights that it was built with.
        optimizer.reload_model_params()
    _open_logs(state, folder)
    progress = state.train_state
    loader = open_loader(
        cfg,
        layout,
        state.pipeline.groups,
        dataset,
        consumed=progress.consumed_train_samples,
        steps=cfg.train.iters - progress.step,
    )
    return SetupOutput(
        state=state,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        train_data_iterator=StepIterator(loader, state.pipeline),
        held_out=HeldOut(state) if cfg.data.validation_shards else None,
        checkpointing_context=context,
    )


def make_demo_shards(cfg: ConfigContainer) -> None:
    """Make the demo shards of `data.demo` if they are not there; the first rank of each node does, the others wait."""
    if not cfg.data.demo:
        return
    from data.demo import ensure_demo

    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        ensure_demo(Path(cfg.data.shards).parent, cfg.data.demo)
    dist.barrier()


def _seed(cfg: ConfigContainer, groups: RunGroups) -> None:
    """Seed every generator: dropout differs between data-parallel ranks, stages and modules."""
    name, pgs = next(iter(groups.collections.items()))
    seed = seed_for(cfg.run.seed, "rank", name, pgs.dp.rank(), pgs.pp.rank()) % 2**31
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
    progress_log.job_started(state.run_dir, world_size=state.layout.world_size, step=step)
    if resumed_from is not None:
        state.console.message(f"continues from {resumed_from}, step {step}")


def _quieten() -> None:
    """Megatron-Core warns on import and construction of what this program chose on purpose."""
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
    logging.getLogger("megatron").setLevel(logging.ERROR)
