"""Copies from the host to a device that the host does not wait for."""

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on `device`. From memory that is not pinned the host would wait for the copy, behind all
    that is queued on the device."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
