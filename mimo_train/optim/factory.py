"""One Megatron-Core optimizer per module under one `ModuleOptimizer`, and a learning-rate schedule per module."""

from dataclasses import fields, replace
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.models.mimo.optimizer import ModuleOptimizerInfo
from megatron.core.optimizer import (
    OptimizerConfig,
    ParamKey,
    ParamPredicate,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler, MegatronGradScaler
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from mimo_train.config.schema import LANGUAGE, ConfigContainer, OptimConfig
from mimo_train.model.build import modules_of
from mimo_train.model.freeze import release_steps
from mimo_train.optim import adam
from mimo_train.optim.module_optimizer import RELEASE, ModuleOptimizer
from mimo_train.optim.replicated import store_like_distributed
from mimo_train.parallel.groups import RunGroups
from mimo_train.plan.memory import PARTS


def build_optimizer(cfg: ConfigContainer, model: list[MegatronModule], groups: RunGroups) -> ModuleOptimizer:
    """The run's optimizer: each module has its own, with its settings; clip groups may span modules.

    A plain GPT is the case of one module. Ranks hold the optimizers of their modules; states are sharded over the
    module's data-parallel ranks, or whole on each of them (`optim.distributed_optimizer`).

    Raises:
        ValueError: an entry of `modules.NAME.freeze_until` matches no parameter.
    """
    adam.install()
    here = modules_of(model)
    infos, clip_grads, releases = {}, {}, {}
    for name, grid in groups.grids.items():
        pgs, optimizer = groups.collections.get(name), None
        trained = not is_frozen(name, cfg)
        if trained:
            clip_grads[name] = cfg.modules[name].optim.clip_grad
        if trained and name in here:
            config = _optimizer_config(cfg, module_optim(cfg, name))
            key = f"modules.{name}.freeze_until"
            releases |= release_steps(here[name], cfg.modules[name].freeze_until, key, pgs.pp)
            optimizer = get_megatron_optimizer(
                config,
                here[name],
                config_overrides=_group_overrides(cfg, name, config, releases),
                pg_collection=pgs,
                use_gloo_process_groups=False,
            )
            if not config.use_distributed_optimizer:
                for part in optimizer.chained_optimizers:
                    store_like_distributed(part)
        else:
            _join_gathering_of_groups()
        infos[name] = ModuleOptimizerInfo(optimizer, grid, _replica_groups(pgs), is_active=optimizer is not None)
    return ModuleOptimizer(
        infos,
        _optimizer_config(cfg, cfg.optim),
        clip_grads=clip_grads,
        freeze_until={name: dict(module.freeze_until) for name, module in cfg.modules.items()},
        grad_scaler=_grad_scaler(cfg),
        chunks=[chunk for chunks in here.values() for chunk in chunks],
        releases=releases,
        device=next(model[0].parameters()).device,
    )


def module_optim(cfg: ConfigContainer, name: str) -> OptimConfig:
    """The settings of one module: those of `optim`, and over them what `modules.NAME.optim` sets."""
    own = cfg.modules[name].optim
    known = {field.name for field in fields(OptimConfig)}
    changed = {field.name: getattr(own, field.name) for field in fields(own) if field.name in known}
    return replace(cfg.optim, **{key: value for key, value in changed.items() if value is not None})


def is_frozen(name: str, cfg: ConfigContainer) -> bool:
    """Whether `modules.<name>.freeze` names all parts of a module."""
    parts = {"llm"} if name == LANGUAGE else {"encoder", "projector"}
    return parts <= set(cfg.modules[name].freeze)


def _join_gathering_of_groups() -> None:
    """Take part in building the optimizer of a module that this rank does not train.

    Megatron-Core 0.19.2 aligns parameter groups over all ranks of the world, not over those of the module
    (optimizer/__init__.py:364, called for dense and for expert parameters): whoever stays away hangs the others.
    """
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
        log_num_zeros_in_grad=cfg.log.num_zeros_in_grad,
        fp16=cfg.train.precision == "fp16",
        bf16=cfg.train.precision == "bf16",
        use_distributed_optimizer=optim.distributed_optimizer,
        overlap_param_gather=optim.overlap_param_gather,
    )


def _group_overrides(
    cfg: ConfigContainer, name: str, config: OptimizerConfig, releases: dict[torch.nn.Parameter, int]
) -> dict:
    """What sets parameters of a module apart: no decay of vectors, the projector's rate, the step of release."""
    overrides = get_standard_config_overrides(config)
    projector_lr = cfg.modules[name].optim.projector_lr
    if projector_lr is not None:
        overrides[ParamKey(name=f"module.{PARTS['projector']}")] = {"max_lr": projector_lr}
    for step in sorted(set(releases.values())):
        # An equal step for equal parameters on every rank, though each knows only its own.
        released_then = ParamPredicate(f"trained from step {step}", partial(_is_released, releases, step))
        overrides[ParamKey(predicate=released_then)] = {RELEASE: step}
    return overrides


def _is_released(releases: dict[torch.nn.Parameter, int], step: int, parameter: torch.nn.Parameter) -> bool:
    return releases.get(parameter) == step


def _grad_scaler(cfg: ConfigContainer) -> MegatronGradScaler | None:
    optim = cfg.optim
    if cfg.train.precision != "fp16":
        return None
    if optim.loss_scale:
        return ConstantGradScaler(optim.loss_scale)
    return DynamicGradScaler(
        initial_scale=optim.initial_loss_scale,
        min_scale=optim.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=optim.loss_scale_window,
        hysteresis=1,
    )


class ModuleSchedulers:
    """The learning-rate schedules of all trained modules, stepped together.

    A schedule is a function of the steps done and the config, so every rank follows every module's, also of modules
    that stand elsewhere: the logging rank can log them without a message.
    """

    def __init__(self, cfg: ConfigContainer, optimizer: ModuleOptimizer):
        self.num_steps = 0
        self._by_module, self._logged = {}, {}
        for name, info in optimizer.module_infos.items():
            if is_frozen(name, cfg):
                continue
            optim, projector_lr = module_optim(cfg, name), cfg.modules[name].optim.projector_lr
            self._by_module[name] = _scheduler(cfg, optim, info.optimizer or _NoParameters())
            # Of a group that sets neither, Megatron-Core takes both rates from the schedule.
            self._logged[name] = (name, {})
            if projector_lr is not None:
                self._logged[f"{name}.projector"] = (name, {"max_lr": projector_lr})

    def step(self, increment: int = 1) -> None:
        """Move on by `increment` optimizer steps."""
        self.num_steps += increment
        for scheduler in self._by_module.values():
            scheduler.step(increment=increment)

    def learning_rates(self) -> dict[str, float]:
        """Learning rate of the next optimizer step, by module, and by NAME.projector where that has its own."""
        return {key: self._by_module[name].get_lr(group) for key, (name, group) in self._logged.items()}

    def state_dict(self) -> dict[str, int]:
        """Steps done."""
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Move every schedule to where a checkpoint stood."""
        self.step(state["num_steps"] - self.num_steps)


class _NoParameters:
    """What a schedule steps when the module's parameters are on other ranks."""

    param_groups = ()


def _scheduler(cfg: ConfigContainer, optim: OptimConfig, optimizer) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=optim.lr,
        min_lr=optim.lr if optim.decay == "constant" else optim.min_lr,
        lr_warmup_steps=optim.warmup_iters,
        lr_decay_steps=max(cfg.train.iters, optim.warmup_iters + 1),
        lr_decay_style=optim.decay,
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=cfg.train.iters,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def _replica_groups(pgs: ProcessGroupCollection | None) -> ProcessGroupCollection | None:
    """What tells copies of the optimizer's state apart. In a checkpoint Megatron-Core 0.19.2 takes the ranks in tp,
    pp and dp (mimo/optimizer.py:339), which context-parallel ranks have in common."""
    if pgs is None:
        return None
    return ProcessGroupCollection(tp=pgs.tp, pp=pgs.pp, dp=pgs.dp_cp, dp_cp=pgs.dp_cp, expt_dp=pgs.expt_dp)
