"""Logits by blocks of the vocabulary, and sums over them on all tensor-parallel ranks (online softmax, Milakov and
Gimelshein 2018, arXiv 1805.02867).

Shape suffixes: N tokens, H hidden size, V rows of the weight on this rank, C rows of a block, K sums.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mimo_train.estimate.activations import block_rows


@dataclass(frozen=True)
class Logits:
    """How logits follow from the product of hidden states and weight: softcap * tanh(product / softcap) / divisor."""

    softcap: float = 0.0
    """0: none."""
    divisor: float = 1.0

    def __call__(self, hidden_NH: torch.Tensor, weight_CH: torch.Tensor) -> torch.Tensor:
        """Return logits [N, C], a new fp32 tensor; products are rounded as an output layer rounds them."""
        logits_NC = F.linear(hidden_NH, weight_CH).float()
        if self.softcap:
            logits_NC = logits_NC.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits_NC if self.divisor == 1 else logits_NC.div_(self.divisor)

    def slope(self, logits_NC: torch.Tensor) -> torch.Tensor | None:
        """Return the derivative of the cap, from logits; None without one."""
        return 1 - (logits_NC * (self.divisor / self.softcap)).square_() if self.softcap else None


@dataclass(frozen=True)
class Vocabulary:
    """The rows of an output layer on the tensor-parallel ranks: equal parts, in the order of ranks."""

    tp_group: dist.ProcessGroup
    tokens: int
    """Rows of the whole weight that are not padding, which is at its end."""
    logits: Logits = Logits()

    def part(self, rows: int) -> tuple[int, int]:
        """Return the place of this rank's first row in the whole weight, and how many of its `rows` are not padding."""
        first = self.tp_group.rank() * rows
        return first, min(max(self.tokens - first, 0), rows)

    def is_token(self, labels_N: torch.Tensor) -> torch.Tensor:
        """Return which labels are tokens of the vocabulary, [N]."""
        return (labels_N >= 0) & (labels_N < self.tokens)


def blocks_of(tokens: int, rows: int) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of blocks of `rows` rows, for the logits of `tokens` tokens."""
    size = block_rows(tokens)
    return ((begin, min(begin + size, rows)) for begin in range(0, rows, size))


class ExponentialSum:
    """Sums of exp(logits) over blocks, relative to the largest logit so far."""

    def __init__(self, tokens: int, device: torch.device, sums: int = 1):
        """`sums`: 2 to add up also those that `add` gets a mask of."""
        self.most_N = torch.full((tokens,), -torch.inf, device=device)
        self.sums_KN = torch.zeros(sums, tokens, device=device)

    def add(self, logits_NC: torch.Tensor, mask_NC: torch.Tensor | None = None) -> None:
        """Add a block, whose memory then has exp(logits - `most_N`)."""
        most_N = torch.maximum(self.most_N, logits_NC.amax(1))
        terms_NC = logits_NC.sub_(most_N.unsqueeze(1)).exp_()
        sums = [terms_NC.sum(1)]
        if mask_NC is not None:
            sums.append((terms_NC * mask_NC).sum(1))
        self.sums_KN = self.sums_KN * (self.most_N - most_N).exp() + torch.stack(sums)
        self.most_N = most_N

    def log(self) -> torch.Tensor:
        """Return the logarithm of the sum, [N]."""
        return self.most_N + self.sums_KN[0].log()


def add_up(group: dist.ProcessGroup, exponentials: Sequence[ExponentialSum], *sums_N: torch.Tensor) -> torch.Tensor:
    """Add up over the ranks of `group`, in two messages: `exponentials` in place, and other sums, which it returns."""
    others_KN = torch.stack(sums_N) if sums_N else exponentials[0].sums_KN[:0]
    if group.size() == 1:
        return others_KN
    most = torch.stack([each.most_N for each in exponentials])
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    scaled = [each.sums_KN * (each.most_N - most_N).exp() for each, most_N in zip(exponentials, most, strict=True)]
    sums_KN = torch.cat([*scaled, others_KN])
    dist.all_reduce(sums_KN, group=group)
    sizes = [len(each) for each in scaled]
    *reduced, others_KN = sums_KN.split([*sizes, len(others_KN)])
    for each, most_N, sums in zip(exponentials, most, reduced, strict=True):
        each.most_N, each.sums_KN = most_N, sums
    return others_KN


def add_product(sum_to: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
    """Add first @ second to `sum_to`, which may be of higher precision."""
    if sum_to.dtype == first.dtype:
        sum_to.addmm_(first, second)
    else:
        sum_to.add_(first @ second)
