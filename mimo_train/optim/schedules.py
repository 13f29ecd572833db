"""Changes by step: a learning-rate schedule per module, and the stages of `modules.NAME.freeze_until`."""

from collections.abc import Callable
from dataclasses import fields, replace

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from mimo_train.config.parts import parts_of
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_train import OptimConfig
from mimo_train.layout.ranks import RunLayout
from mimo_train.optim.module_optimizer import ModuleOptimizer
from mimo_train.parallel.bridge.shapes import Needs
from mimo_train.parallel.groups import RunGroups


def module_optim(cfg: ConfigContainer, name: str) -> OptimConfig:
    """Return the settings of one module: those of `optim`, overridden by `modules.NAME.optim`."""
    overrides = cfg.modules[name].optim
    names = {field.name for field in fields(OptimConfig)}
    changed = {field.name: getattr(overrides, field.name) for field in fields(overrides) if field.name in names}
    return replace(cfg.optim, **{key: value for key, value in changed.items() if value is not None})


def is_frozen(name: str, cfg: ConfigContainer) -> bool:
    """True if `modules.<name>.freeze` names all parts of a module."""
    return set(parts_of(name)) <= set(cfg.modules[name].freeze)


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
            optim, projector_lr = module_optim(cfg, name), cfg.modules[name].optim.projector_lr
            self._by_module[name] = _scheduler(cfg, optim, info.optimizer or _NoParameters())
            # Megatron-Core takes both rates from the schedule if a group sets neither.
            self._logged[name] = (name, {})
            if projector_lr is not None:
                self._logged[f"{name}.projector"] = (name, {"max_lr": projector_lr})

    def step(self, increment: int = 1) -> None:
        """Advance by `increment` optimizer steps."""
        self.num_steps += increment
        for scheduler in self._by_module.values():
            scheduler.step(increment=increment)

    def learning_rates(self) -> dict[str, float]:
        """Return the learning rate of the next step by module, and by NAME.projector if the projector has its own."""
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


class FreezeStages:
    """Freezes parameters until their step. Until then they require no gradient, and the optimizer does not change them.
    The learning rate follows the run's steps: a part that is released late starts at the rate of that step, without its
    own warm-up."""

    def __init__(
        self, cfg: ConfigContainer, optimizer: ModuleOptimizer, on_step: Callable[[int], None] = lambda step: None
    ):
        """Freeze the parameters that the first step does not train. `apply` releases them, also in a resumed run.
        `on_step` is called at the start of every step, with the steps done."""
        self._optimizer, self._on_step = optimizer, on_step
        self._steps = sorted({step for module in cfg.modules.values() for step in module.freeze_until.values()} - {0})
        self._waiting: dict[int, list[torch.nn.Parameter]] = {}
        for parameter, step in optimizer.releases.items():
            parameter.requires_grad_(False)
            self._waiting.setdefault(step, []).append(parameter)

    def apply(self, step: int) -> None:
        """Release the parameters that are trained from `step` on. Called at the start of every step, after loading.
        `step` counts those of earlier jobs too."""
        while self._steps and self._steps[0] <= step:
            released = self._steps.pop(0)
            for parameter in self._waiting.pop(released, []):
                parameter.requires_grad_(True)
            self._optimizer.release(released)
        self._on_step(step)


class GradientNeeds:
    """The step from which each stage of each source module needs gradients; the same on every rank."""

    def __init__(
        self,
        layout: RunLayout,
        modules: dict[str, list[MegatronModule]],
        releases: dict[torch.nn.Parameter, int],
        groups: RunGroups,
    ):
        """Find the needs of all stages. Collective over all ranks, before `FreezeStages` freezes anything.

        Args:
            modules: the chunks of the modules of this rank.
            releases: the step from which a parameter is trained, if it is frozen at first.
        """
        local: dict[tuple[str, int, bool], int] = {}
        sources = {edge.source for edge in layout.edges}
        for name, chunks in modules.items():
            for chunk in chunks if name in sources else ():
                for parameter_name, parameter in unwrap_model(chunk).named_parameters():
                    if parameter.requires_grad:
                        place = name, groups.collections[name].pp.rank(), parameter_name.startswith("encoders.")
                        step = releases.get(parameter, 0)
                        local[place] = min(step, local.get(place, step))
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, local)
        self._first_steps: dict[tuple[str, int, bool], int] = {}
        for first_steps in everyone:
            for place, step in first_steps.items():
                self._first_steps[place] = min(step, self._first_steps.get(place, step))
        self._stages = {name: layout.modules[name].pp for name in layout.modules if name in sources}

    def at(self, step: int) -> dict[str, Needs]:
        """Return the gradient needs of each source after `step` steps."""
        trained = {place for place, first in self._first_steps.items() if first <= step}
        return {
            name: Needs(
                stages=tuple(
                    any((name, before, True) in trained for before in range(stage + 1)) for stage in range(stages)
                ),
                features=any(place[0] == name for place in trained),
            )
            for name, stages in self._stages.items()
        }
