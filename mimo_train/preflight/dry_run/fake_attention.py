"""Attention by values, which fake tensors have none of: the causal mask of fewer queries than keys, in torch a class of
tensors that fake ones do not mix with, and the ends of documents."""

import torch

_MARK = "is_lower_right"
_PAIRS = "pairs"


def install(device: str) -> None:
    """Replace the mask, for the rest of this process: by a plain one on the CPU, where torch makes one of its own, and
    on CUDA, where a kernel needs none, by one without memory that is known by a mark. Ends of documents get one too:
    how many pairs of a query and a key there are."""
    from mimo_train.models import attention
    from mimo_train.models.documents import Documents

    def lower_right(queries: int, keys: int) -> torch.Tensor:
        if device == "cpu":
            return torch.ones(queries, keys, dtype=torch.bool).tril(diagonal=keys - queries)
        mask = torch.ones(1, 1, dtype=torch.bool, device="cuda").expand(queries, keys)
        setattr(mask, _MARK, True)
        return mask

    attention.causal_lower_right = lower_right
    original = Documents.cumulative

    def cumulative(self: Documents, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        found = original(self, rank, device)
        meetings = self.meetings(rank)
        pairs = sum((one.last_query - one.first_query) * (one.last_key - one.first_key) for one in meetings)
        setattr(found[1], _PAIRS, pairs)
        return found

    Documents.cumulative = cumulative  # type: ignore[method-assign]


def is_lower_right(mask: torch.Tensor) -> bool:
    """Whether it is that mask."""
    return getattr(mask, _MARK, False)


def pairs_of(key_ends: torch.Tensor) -> int:
    """Pairs of a query and a key of the documents whose keys end there."""
    return getattr(key_ends, _PAIRS)
