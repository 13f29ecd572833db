"""Losses, at Megatron-Bridge's path."""

from mimo_train.training.tasks.sft import masked_token_loss

__all__ = ["masked_token_loss"]
