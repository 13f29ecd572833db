"""One Megatron-Core optimizer per module under one `MimoOptimizer`, and a learning-rate schedule per module."""

import torch.distributed as dist
from megatron.core.models.mimo.optimizer import MimoOptimizer, ModuleOptimizerInfo
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule

from mimo_train.config import LANGUAGE, ConfigContainer
from mimo_train.groups import RunGroups
from mimo_train.model.build import modules_of
from mimo_train.optim import adam


def build_optimizer(cfg: ConfigContainer, model: MegatronModule, groups: RunGroups) -> MimoOptimizer:
    """The run's optimizer: clips by the gradient norm over all modules, steps each module's own optimizer.

    A plain GPT is the case of one module. Ranks hold the optimizers of their modules; states are sharded over the
    module's data-parallel ranks.
    """
    adam.install()
    config = _optimizer_config(cfg)
    here = modules_of(model)
    infos = {}
    for name, grid in groups.grids.items():
        pgs = groups.collections.get(name)
        trained_here = name in here and not is_frozen(name, cfg)
        optimizer = None
        if trained_here:
            optimizer = get_megatron_optimizer(config, [here[name]], pg_collection=pgs, use_gloo_process_groups=False)
        else:
            _join_gathering_of_groups()
        infos[name] = ModuleOptimizerInfo(optimizer=optimizer, grid=grid, pg_collection=pgs, is_active=trained_here)
    return MimoOptimizer(infos, config)


def _join_gathering_of_groups() -> None:
    """Take part in building the optimizer of a module that this rank does not train.

    Megatron-Core 0.19.2 aligns parameter groups over all ranks of the world, not over those of the module
    (optimizer/__init__.py:364, called for dense and for expert parameters): whoever stays away hangs the others.
    """
    for _ in ("dense", "expert"):
        dist.all_gather_object([None] * dist.get_world_size(), [])


def _optimizer_config(cfg: ConfigContainer) -> OptimizerConfig:
    optim = cfg.optim
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
        bf16=cfg.train.precision == "bf16",
        use_distributed_optimizer=True,
    )


class ModuleSchedulers:
    """The learning-rate schedules of all trained modules, stepped together.

    A schedule is a function of the steps done and the config, so every rank follows every module's, also of modules
    that stand elsewhere: the logging rank can log them without a message.
    """

    def __init__(self, cfg: ConfigContainer, optimizer: MimoOptimizer):
        self.num_steps = 0
        self._by_module = {
            name: _scheduler(cfg, info.optimizer or _NoParameters())
            for name, info in optimizer.module_infos.items()
            if not is_frozen(name, cfg)
        }

    def step(self, increment: int = 1) -> None:
        """Move on by `increment` optimizer steps."""
        self.num_steps += increment
        for scheduler in self._by_module.values():
            scheduler.step(increment=increment)

    def learning_rates(self) -> dict[str, float]:
        """Learning rate of the next optimizer step, by module."""
        return {name: scheduler.optimizer.param_groups[0]["lr"] for name, scheduler in self._by_module.items()}

    def state_dict(self) -> dict[str, int]:
        """Steps done."""
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Move every schedule to where a checkpoint stood."""
        self.step(state["num_steps"] - self.num_steps)


class _NoParameters:
    """What a schedule steps when the module's parameters are on other ranks."""

    def __init__(self):
        self.param_groups = [{"params": [], "lr": 0.0, "weight_decay": 0.0}]


def is_frozen(name: str, cfg: ConfigContainer) -> bool:
    """Whether `modules.<name>.freeze` names all parts of a module."""
    parts = {"llm"} if name == LANGUAGE else {"encoder", "projector"}
    return parts <= set(cfg.modules[name].freeze)


def _scheduler(cfg: ConfigContainer, optimizer) -> OptimizerParamScheduler:
    optim = cfg.optim
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
