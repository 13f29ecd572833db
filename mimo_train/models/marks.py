"""What Megatron-Core reads from tensors beside their values."""

import torch


def mark(tensor: torch.Tensor, **marks: object) -> None:
    """Set attributes of a tensor that Megatron-Core looks for, such as `sequence_parallel`; torch declares none."""
    for name, value in marks.items():
        setattr(tensor, name, value)
