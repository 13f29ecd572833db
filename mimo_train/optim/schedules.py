"""The learning-rate schedule of every module."""

from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mimo_train.config.parts import parts_of
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_optim import GroupConfig, OptimConfig
from mimo_train.optim.module_optimizer import ModuleOptimizer


def is_frozen(name: str, cfg: ConfigContainer) -> bool:
    """True if `modules.<name>.freeze` names all parts of a module."""
    return set(parts_of(name)) <= set(cfg.modules[name].freeze)


def rates_of(group: GroupConfig) -> dict[str, float]:
    """Return the rates that a parameter group sets, as Megatron-Core's schedule reads them."""
    return {key: rate for key, rate in (("max_lr", group.lr), ("min_lr", group.min_lr)) if rate is not None}


_STYLES = {"wsd": "WSD", "inverse_sqrt": "inverse-square-root"}
"""Megatron-Core's names of schedules, where they differ from `optim.decay`."""


class ModuleSchedulers:
    """The learning-rate schedules of all trained modules, stepped together. A schedule depends only on the steps done
    and the config. Every rank has those of all modules, so the logging rank needs no communication."""

    def __init__(self, cfg: ConfigContainer, optimizer: ModuleOptimizer):
        self.num_steps = 0
        self._by_module: dict[str, OptimizerParamScheduler] = {}
        self._logged: dict[str, tuple[str, dict[str, float]]] = {}
        for name, info in optimizer.module_infos.items():
            if is_frozen(name, cfg):
                continue
            optim, projector_lr = cfg.optim_of(name), cfg.modules[name].optim.projector_lr
            self._by_module[name] = _scheduler(cfg, optim, info.optimizer or _NoParameters())
            # Megatron-Core takes both rates from the schedule if a group sets neither.
            self._logged[name] = (name, {})
            if projector_lr is not None:
                self._logged[f"{name}.projector"] = (name, {"max_lr": projector_lr})
            for pattern, group in cfg.modules[name].optim.groups.items():
                if rates := rates_of(group):
                    self._logged[f"{name}.{pattern}"] = (name, rates)

    def step(self, increment: int = 1) -> None:
        """Advance by `increment` optimizer steps."""
        self.num_steps += increment
        for scheduler in self._by_module.values():
            scheduler.step(increment=increment)

    def learning_rates(self) -> dict[str, float]:
        """Return the learning rate of the next step by module, by NAME.projector if the projector has its own, and by
        NAME.PATTERN for groups with rates."""
        return {key: self._by_module[name].get_lr(group) for key, (name, group) in self._logged.items()}

    def state_dict(self) -> dict[str, int]:
        """Return the steps done."""
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Move every schedule to the step of a checkpoint. Raise TypeError if it is not an integer."""
        if type(state["num_steps"]) is not int:
            raise TypeError(f"num_steps is {state['num_steps']!r}")
        self.step(state["num_steps"] - self.num_steps)


class _NoParameters:
    """Replaces the optimizer when the module's parameters are on other ranks."""

    param_groups = ()


def _scheduler(
    cfg: ConfigContainer, optim: OptimConfig, optimizer: MegatronOptimizer | _NoParameters
) -> OptimizerParamScheduler:
    steps = max(cfg.train.iters, optim.warmup_iters + 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=optim.lr,
        min_lr=optim.lr if optim.decay == "constant" else optim.min_lr,
        lr_warmup_steps=optim.warmup_iters,
        lr_decay_steps=steps,
        lr_decay_style=_STYLES.get(optim.decay, optim.decay),
        wsd_decay_steps=max(1, round(optim.wsd_decay_fraction * (steps - optim.warmup_iters))),
        lr_wsd_decay_style="minus_sqrt",
        start_wd=optim.weight_decay,
        end_wd=optim.weight_decay,
        wd_incr_steps=cfg.train.iters,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
