"""The forward step of a run with several modules, at the path that Megatron-Bridge gives it."""

import logging

from mimo_train.training.step.mimo_step import forward_step, get_batch, loss_func

__all__ = ["forward_step", "get_batch", "logger", "loss_func"]

logger = logging.getLogger(__name__)
