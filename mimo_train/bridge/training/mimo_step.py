"""The forward step of a run with several modules, at Megatron-Bridge's path."""

import logging

from mimo_train.training.step.forward_step import get_batch
from mimo_train.training.step.forward_step import mimo_forward_step as forward_step
from mimo_train.training.tasks.sft import masked_token_loss as loss_func

__all__ = ["forward_step", "get_batch", "logger", "loss_func"]

logger = logging.getLogger(__name__)
