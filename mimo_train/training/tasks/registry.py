"""The task of a run."""

from mimo_train.config.schema import ConfigContainer
from mimo_train.training.tasks.base import Task
from mimo_train.training.tasks.distill import Distill
from mimo_train.training.tasks.dpo import Dpo
from mimo_train.training.tasks.ipo import Ipo
from mimo_train.training.tasks.kto import Kto
from mimo_train.training.tasks.orpo import Orpo
from mimo_train.training.tasks.reward import Reward
from mimo_train.training.tasks.sft import Sft
from mimo_train.training.tasks.simpo import Simpo

CLASSES: dict[str, type[Task]] = {
    "sft": Sft,
    "distill": Distill,
    "dpo": Dpo,
    "ipo": Ipo,
    "simpo": Simpo,
    "orpo": Orpo,
    "kto": Kto,
    "reward": Reward,
}
"""Names of `mimo_train.config.tasks.TASKS`."""


def task_of(cfg: ConfigContainer) -> Task:
    """Return a new object of the task `train.task`."""
    return CLASSES[cfg.train.task](cfg)
