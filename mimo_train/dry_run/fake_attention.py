"""The causal mask of fewer queries than keys, which in torch is a class of tensors that fake ones do not mix with."""

import torch

_MARK = "is_lower_right"


def install(device: str) -> None:
    """Replace the mask, for the rest of this process: by a plain one on the CPU, where torch makes one of its own, and
    on CUDA, where a kernel needs none, by one without memory that is known by a mark."""
    from mimo_train.model import attention

    def lower_right(queries: int, keys: int) -> torch.Tensor:
        if device == "cpu":
            return torch.ones(queries, keys, dtype=torch.bool).tril(diagonal=keys - queries)
        mask = torch.ones(1, 1, dtype=torch.bool, device="cuda").expand(queries, keys)
        setattr(mask, _MARK, True)
        return mask

    attention.causal_lower_right = lower_right  # type: ignore[assignment]


def is_lower_right(mask: torch.Tensor) -> bool:
    """Whether it is that mask."""
    return getattr(mask, _MARK, False)
