"""Losses, at Megatron-Bridge's path."""

from mimo_train.training.step.losses import masked_token_loss

__all__ = ["masked_token_loss"]
