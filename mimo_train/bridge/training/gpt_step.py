"""The forward step of a plain GPT, at Megatron-Bridge's path."""

from mimo_train.training.step.gpt_step import forward_step

__all__ = ["forward_step"]
