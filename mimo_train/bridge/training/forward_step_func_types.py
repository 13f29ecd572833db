"""The type of a forward step, at Megatron-Bridge's path."""

from mimo_train.training.step.forward_step import ForwardStepCallable

__all__ = ["ForwardStepCallable"]
