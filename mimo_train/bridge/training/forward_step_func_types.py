"""The type of a forward step, at the path that Megatron-Bridge gives it."""

from mimo_train.training.step.forward_step import ForwardStepCallable

__all__ = ["ForwardStepCallable"]
