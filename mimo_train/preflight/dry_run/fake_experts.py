"""Experts under a router whose choices have no values: every expert gets as many tokens from each rank as any other.

Megatron-Core 0.19.2 copies the number of tokens of each expert to the host and cuts by them (token_dispatcher.py,
`MoEAlltoAllTokenDispatcher.preprocess`).
"""

from typing import Any

import numpy
import torch

from mimo_train.preflight.dry_run.fake_tensors import FakeCounts


def balanced(rows: int, experts: int) -> numpy.ndarray:
    """Rows of each expert; the first have those that are left over."""
    share, left = divmod(rows, experts)
    return numpy.array([share + (expert < left) for expert in range(experts)])


def install(counts: FakeCounts) -> None:
    """Balance the experts, for the rest of this process."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as Dispatcher

    original = Dispatcher.preprocess

    def preprocess(self: Any, routing_map: torch.Tensor) -> torch.Tensor:
        tokens = original(self, routing_map)
        if self.drop_and_pad:
            return tokens
        rows = routing_map.size(0) * self.config.moe_router_topk
        counts.selected = rows
        each, ranks = balanced(rows, self.num_experts), self.tp_size * self.ep_size
        own = each[self.local_expert_indices]
        if ranks > 1:
            self.input_splits = each.reshape(self.ep_size, self.num_local_experts).sum(axis=1)
            self.output_splits = numpy.full(self.ep_size, own.sum())
            self.output_splits_tp = numpy.full(self.tp_size, own.sum() * self.ep_size)
        with counts.on_the_host():
            if self.num_local_experts > 1:
                self.num_global_tokens_per_local_expert = torch.from_numpy(numpy.tile(own, (ranks, 1)))
            return torch.from_numpy(own * ranks)

    Dispatcher.preprocess = preprocess
