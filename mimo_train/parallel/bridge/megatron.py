"""What Megatron-Core 0.19.2's own bridges need to know, and what they cannot carry (`placement.bridge=megatron`)."""

import torch.distributed as dist

from mimo_train.parallel.bridge.shapes import TokenPlan, Turns, boundary
from mimo_train.plan.layout import RunLayout


class MegatronSizes:
    """Rows of each sample of this rank in the microbatch that an encoder computes next."""

    def __init__(self, layout: RunLayout, plan: TokenPlan):
        self._layout, self._plan = layout, plan
        self._turns = {name: Turns(plan) for name in layout.apart_encoders}

    def __call__(self, name: str) -> list[int]:
        """Rows of every sample of this rank, of encoder `name`."""
        encoder, microbatch = self._layout.modules[name], self._turns[name].forward()
        replicas = boundary(encoder, self._layout.language)
        replica = next(index for index, ranks in enumerate(replicas) if dist.get_rank() in ranks)
        first, last = self._plan.spans(encoder, microbatch)[replica]
        return self._plan.counts[name][microbatch][first:last]

    def require_possible(self) -> None:
        """Every rank checks the whole step, so every rank stops.

        Raises:
            ValueError: samples of a microbatch have different numbers of rows, which Megatron-Core's bridges carry only
                from fewer encoder replicas to more on other ranks (mimo/model/base.py:528-558), or between equal ones.
        """
        language = self._layout.language
        for name, microbatches in self._plan.counts.items():
            encoder = self._layout.modules[name]
            carried = encoder.dp == language.dp or (name in self._layout.apart_encoders and encoder.dp < language.dp)
            for number, counts in enumerate(microbatches):
                if not carried and len(set(counts)) > 1:
                    raise ValueError(
                        f"placement.bridge: Megatron-Core's bridge cannot carry {name}, whose samples of microbatch "
                        f"{number} take from {min(counts)} to {max(counts)} rows, from dp {encoder.dp} to dp "
                        f"{language.dp}: use placement.bridge=planned"
                    )
