"""Sizes for Megatron-Core 0.19.2's own bridges, and the counts they do not support (`placement.bridge=megatron`)."""

import torch.distributed as dist

from mimo_train.config.fault import UserError
from mimo_train.parallel.bridge.shapes import StepShapes, Turns, giving_replicas
from mimo_train.plan.layout import RunLayout


class MegatronSizes:
    """Rows of each sample of this rank in the microbatch that a giver computes next."""

    def __init__(self, layout: RunLayout, shapes: StepShapes):
        self._layout, self._shapes = layout, shapes
        self._turns = {edge.giver: Turns(shapes) for edge in layout.disjoint_edges}

    def __call__(self, name: str) -> list[int]:
        """Rows of every sample of this rank, of the giver `name`."""
        giver, microbatch = self._layout.modules[name], self._turns[name].forward()
        replica = next(index for index, ranks in enumerate(giving_replicas(giver)) if dist.get_rank() in ranks)
        first, last = self._shapes.spans(giver, microbatch)[replica]
        return self._shapes.counts[name][microbatch][first:last]

    def require_possible(self) -> None:
        """Check the whole step, on every rank, so that every rank stops.

        Raises:
            UserError: samples of a microbatch have different numbers of rows, which Megatron-Core's bridges carry only
                from fewer replicas to more on other ranks (mimo/model/base.py:528-558), or between equal ones.
        """
        for edge in self._layout.edges:
            giver, taker = self._layout.modules[edge.giver], self._layout.modules[edge.taker]
            carried = giver.dp == taker.dp or (not edge.is_shared and giver.dp < taker.dp)
            for number, counts in enumerate(self._shapes.counts[edge.giver]):
                if not carried and len(set(counts)) > 1:
                    raise UserError(
                        f"placement.bridge: Megatron-Core's bridge cannot carry {edge.giver}, whose samples of "
                        f"microbatch {number} take from {min(counts)} to {max(counts)} rows, from dp {giver.dp} to dp "
                        f"{taker.dp}: use placement.bridge=native"
                    )
