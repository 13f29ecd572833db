"""A checkpoint that could not be written: the same error on every rank, at the same step."""

from pathlib import Path

import torch.distributed as dist

from mimo_train.checkpoint.format.files import Damage
from mimo_train.checkpoint.format.write import NotFinite
from mimo_train.checkpoint.full_disk import why_full
from mimo_train.config.fault import PeersError, UserError


class SaveFailed(UserError):
    """A checkpoint could not be written; earlier ones are as they were.

    Attributes:
        is_final: whether no later save can do better.
    """

    is_final = False


class NotFiniteWeights(SaveFailed):
    """Weights are NaN or infinite."""

    is_final = True


class _PeersSaveFailed(SaveFailed, PeersError):
    """One that another rank has found."""


class _PeersNotFiniteWeights(NotFiniteWeights, PeersError):
    """One that another rank has found."""


def named(error: BaseException, run_dir: Path) -> SaveFailed | None:
    """What a user is told of an error of a save; None where it is none that a user can cause."""
    if isinstance(error, SaveFailed):
        return error
    if isinstance(error, NotFinite):
        return NotFiniteWeights(
            f"no checkpoint of this step is written: weights are not finite: {error}; the newest checkpoint is as it "
            "was: continue from it with a smaller optim.lr or optim.weight_decay"
        )
    if not isinstance(error, OSError | Damage):
        return None
    why = why_full(error, run_dir)
    what, remedy = (
        (f"{run_dir} cannot take more files ({why})", "free space, or lower checkpoint.keep")
        if why
        else (f"a checkpoint cannot be written to {run_dir} ({error})", "mend that")
    )
    return SaveFailed(f"run.dir: {what}: {remedy}; complete checkpoints are as they were")


def raise_together(own: BaseException | None, run_dir: Path) -> None:
    """Raise on every rank what any rank has found, with the text of the lowest such rank. Collective.

    Raises:
        SaveFailed: a peer's is a PeersError too.
        BaseException: `own`, where it is no error that a user can cause.
    """
    mine = None if own is None else named(own, run_dir)
    strange = own is not None and mine is None
    told: list[tuple[str, bool] | None] = [None]
    if own is not None:
        told = [(str(mine), mine.is_final) if mine is not None else (f"{type(own).__name__}: {own}", True)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        told *= dist.get_world_size()
        dist.all_gather_object(told, told[0])
    if strange and own is not None:
        raise own
    rank, first = next(((rank, one) for rank, one in enumerate(told) if one is not None), (0, None))
    if first is None:
        return
    if mine is not None and (len(told) == 1 or rank == dist.get_rank()):
        raise mine from own
    text, is_final = first
    raise (_PeersNotFiniteWeights if is_final else _PeersSaveFailed)(text) from own
