"""The forward step of a run with several modules, at Megatron-Bridge's path."""

import logging

from mimo_train.training.step.mimo_step import forward_step, get_batch, loss_func

__all__ = ["forward_step", "get_batch", "logger", "loss_func"]

logger = logging.getLogger(__name__)
