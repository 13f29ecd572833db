"""Builds one Megatron-Core optimizer per module under one `ModuleOptimizer`."""

from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core.models.mimo.optimizer import ModuleOptimizerInfo
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
)
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler, MegatronGradScaler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_optim import OptimConfig
from mimo_train.models.freeze import release_steps
from mimo_train.models.parameters import modules_of
from mimo_train.models.sharding import ShardedModule
from mimo_train.optim.group_optimizer import install
from mimo_train.optim.module_optimizer import ModuleOptimizer, update_shards
from mimo_train.optim.parameter_groups import SETTINGS, group_overrides
from mimo_train.optim.schedules import is_frozen
from mimo_train.optim.shards import fused_sections, shards_of
from mimo_train.parallel import device
from mimo_train.parallel.groups import RunGroups


def build_optimizer(cfg: ConfigContainer, model: list[MegatronModule], groups: RunGroups) -> ModuleOptimizer:
    """Return the run's optimizer: each module has its own, with its settings. Clip groups may span modules.

    A plain GPT has one module. Ranks hold the optimizers of their modules. States are sharded over the module's
    data-parallel ranks, or whole on each of them (`optim.distributed_optimizer`).

    Raises:
        UserError: an entry of `modules.NAME.freeze_until` or `optim.groups` matches no parameter.
    """
    install()
    local_modules = modules_of(model)
    infos: dict[str, ModuleOptimizerInfo] = {}
    clip_grads: dict[str, float | None] = {}
    releases: dict[torch.nn.Parameter, int] = {}
    for name, grid in groups.grids.items():
        pgs, optimizer = groups.collections.get(name), None
        trained = not is_frozen(name, cfg)
        if trained:
            clip_grads[name] = cfg.modules[name].optim.clip_grad
        if trained and name in local_modules:
            assert pgs is not None, name
            config = _optimizer_config(cfg, cfg.optim_of(name))
            if isinstance(local_modules[name][0], ShardedModule):
                config = replace(
                    config, fp16=False, bf16=False, use_distributed_optimizer=False, overlap_param_gather=False
                )
            key = f"modules.{name}.freeze_until"
            releases |= release_steps(local_modules[name], cfg.modules[name].freeze_until, key, pgs.pp)
            optimizer = get_megatron_optimizer(
                config,
                local_modules[name],
                config_overrides=group_overrides(cfg, name, local_modules[name], pgs.pp, releases),
                pg_collection=pgs,
                use_gloo_process_groups=False,
            )
            _order_float32_first(optimizer)
            for chunk in local_modules[name]:
                if isinstance(chunk, ShardedModule):
                    update_shards(optimizer, chunk)
            _attach_shards(optimizer, local_modules[name], pgs)
        else:
            _join_gathering_of_groups()
        infos[name] = ModuleOptimizerInfo(optimizer, grid, _replica_groups(pgs), is_active=optimizer is not None)
    return ModuleOptimizer(
        infos,
        _optimizer_config(cfg, cfg.optim),
        clip_grads=clip_grads,
        grad_scaler=_grad_scaler(cfg),
        chunks=[chunk for chunks in local_modules.values() for chunk in chunks],
        releases=releases,
        device=device.current(),
    )


def _order_float32_first(optimizer: MegatronOptimizer) -> None:
    """Give parameters the places in their group that their states have. Megatron-Core 0.19.2 puts states of fp32
    parameters in front of those of half precision, but not the parameters (optimizer/distrib_optimizer.py:487), so that
    checkpoints would hold one's states as the other's."""
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        for index, group in enumerate(getattr(inner, "opt_group_ranges", ())):
            ordered = sorted(group["params"], key=lambda parameter: parameter.dtype != torch.float32)
            inner.model_param_group_index_map |= {parameter: (index, at) for at, parameter in enumerate(ordered)}


def _attach_shards(optimizer: MegatronOptimizer, chunks: list[torch.nn.Module], groups: ProcessGroupCollection) -> None:
    """Tell each optimizer of a module which parts of matrices its tensors are."""
    sections = fused_sections(chunks)
    for inner in optimizer.chained_optimizers:
        if inner.is_stub_optimizer:
            continue
        by_tensor, shards = shards_of(inner, groups, sections)
        settings = [group.get(SETTINGS, "") for group in inner.optimizer.param_groups]
        of_group = [[each for each in shards if getattr(each.parameter, SETTINGS, "") == name] for name in settings]
        inner.optimizer.attach(by_tensor, of_group)


def _join_gathering_of_groups() -> None:
    """Take part in building the optimizer of a module that this rank does not train. Megatron-Core 0.19.2 aligns
    parameter groups over all ranks of the world, not over the module's (optimizer/__init__.py:364, called for dense and
    for expert parameters). A rank that does not join hangs the others."""
    for _ in ("dense", "expert"):
        dist.all_gather_object([None] * dist.get_world_size(), [])


def _optimizer_config(cfg: ConfigContainer, optim: OptimConfig) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        min_lr=optim.min_lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.beta1,
        adam_beta2=optim.beta2,
        adam_eps=optim.eps,
        decoupled_weight_decay=True,
        clip_grad=optim.clip_grad,
        log_num_zeros_in_grad="num_zeros_in_grad" in cfg.log.metrics,
        fp16=cfg.train.precision == "fp16",
        bf16=cfg.train.precision == "bf16",
        use_distributed_optimizer=optim.distributed_optimizer,
        overlap_param_gather=optim.overlap_param_gather,
    )


def _grad_scaler(cfg: ConfigContainer) -> MegatronGradScaler | None:
    optim = cfg.optim
    if cfg.train.precision != "fp16":
        return None
    if optim.loss_scale:
        return ConstantGradScaler(optim.loss_scale)
    return DynamicGradScaler(
        initial_scale=optim.initial_loss_scale,
        min_scale=1.0,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=optim.loss_scale_window,
        hysteresis=1,
    )


def _replica_groups(pgs: ProcessGroupCollection | None) -> ProcessGroupCollection | None:
    """Return the groups that distinguish replicas of the optimizer's state. For checkpoints Megatron-Core 0.19.2 uses
    the ranks in tp, pp and dp (mimo/optimizer.py:339). These are equal on context-parallel ranks, so dp includes cp
    here."""
    if pgs is None:
        return None
    return ProcessGroupCollection(tp=pgs.tp, pp=pgs.pp, dp=pgs.dp_cp, dp_cp=pgs.dp_cp, expt_dp=pgs.expt_dp)
