"""The task of a run."""

from mimo_train.config.schema import ConfigContainer
from mimo_train.training.tasks.base import Task
from mimo_train.training.tasks.sft import Sft

CLASSES: dict[str, type[Task]] = {"sft": Sft}
"""Names of `mimo_train.config.tasks.TASKS`."""


def task_of(cfg: ConfigContainer) -> Task:
    """Return a new object of the task `train.task`."""
    return CLASSES[cfg.train.task](cfg)
