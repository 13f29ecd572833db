"""`finetune`, at Megatron-Bridge's path."""

from mimo_train.training.pretrain import finetune

__all__ = ["finetune"]
