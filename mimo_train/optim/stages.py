"""Stages of freezing: parameters of `modules.NAME.freeze_until` are not trained before a step, and from it on are."""

import torch

from mimo_train.config import ConfigContainer
from mimo_train.optim.mimo import ModuleOptimizer


class FreezeStages:
    """Holds parameters back until their step.

    Before it they take no gradient, so that nothing is computed for them in backward; their part of the gradient buffer
    stays zero, and the optimizer leaves them alone. The learning rate follows the run's steps meanwhile: a part that is
    released late begins with the rate of that step, without a warm-up of its own.
    """

    def __init__(self, cfg: ConfigContainer, optimizer: ModuleOptimizer):
        """Freeze what the first step does not train; `apply` releases it, also in a run that is resumed."""
        self._optimizer = optimizer
        self._steps = sorted({step for module in cfg.modules.values() for step in module.freeze_until.values()} - {0})
        self._waiting: dict[int, list[torch.nn.Parameter]] = {}
        for parameter, step in optimizer.releases.items():
            parameter.requires_grad_(False)
            self._waiting.setdefault(step, []).append(parameter)

    def apply(self, step: int) -> None:
        """Release what is trained from here on. Called at the start of every step, after a checkpoint is loaded.

        Args:
            step: steps done, also those of the job that was resumed.
        """
        while self._steps and self._steps[0] <= step:
            released = self._steps.pop(0)
            for parameter in self._waiting.pop(released, []):
                parameter.requires_grad_(True)
            self._optimizer.release(released)
