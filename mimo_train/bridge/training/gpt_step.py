"""The forward step of a plain GPT, at Megatron-Bridge's path."""

from mimo_train.training.step.forward_step import gpt_forward_step as forward_step

__all__ = ["forward_step"]
