"""The forward step of a plain GPT, at the path that Megatron-Bridge gives it."""

from mimo_train.training.step.gpt_step import forward_step

__all__ = ["forward_step"]
