"""Before a model is built: whether a checkpoint has all its weights, so that none need be drawn."""

from contextlib import suppress

import torch.distributed as dist

from data.errors import DataError
from mimo_train.checkpoint import folders
from mimo_train.checkpoint.folders import LEFT_OUT
from mimo_train.config.errors import UserError
from mimo_train.layout.run import Run

_LOOKED_AT = 16
"""Checkpoints that are looked at: each is one that `checkpoint.resume=auto` may fall back to."""


def loads_every_weight(run: Run) -> bool:
    """Whether this start continues from a checkpoint with every weight of the model, as rank 0 finds it. Collective.

    Where it is not sure, because a record cannot be read, or there are too many, the answer is no.
    """
    box = [False]
    if dist.get_rank() == 0:
        with suppress(UserError, DataError, OSError):  # `Checkpointer.resume` says it, on every rank
            box = [_all_are_whole(run)]
    dist.broadcast_object_list(box)
    return box[0]


def _all_are_whole(run: Run) -> bool:
    resume = run.cfg.checkpoint.resume
    if resume == "auto":
        found = folders.newest_first(run.checkpoints)
    else:
        chosen = folders.chosen(run.checkpoints, resume)
        found = [] if chosen is None else [chosen]
    return 0 < len(found) <= _LOOKED_AT and all(LEFT_OUT not in folders.read_record(folder) for folder in found)
