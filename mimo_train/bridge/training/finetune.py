"""`finetune`, at the path that Megatron-Bridge gives it."""

from mimo_train.training.pretrain import finetune

__all__ = ["finetune"]
