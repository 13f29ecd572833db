"""Errors of checkpoints that could not be written: the same error on every rank, at the same step."""

from typing import Any, cast

from data.storage.url import Place
from mimo_train.checkpoint.folder_changes import why_full
from mimo_train.checkpoint.folders import key_of
from mimo_train.checkpoint.format.files import Damage
from mimo_train.checkpoint.format.write import NotFinite
from mimo_train.config.errors import PeersError, UserError
from mimo_train.parallel.collectives import agreed


class SaveFailed(UserError):
    """A checkpoint could not be written; earlier ones are unchanged.

    Attributes:
        is_final: True if later saves will fail too.
    """

    is_final = False


class NotFiniteWeights(SaveFailed):
    """Weights are NaN or infinite."""

    is_final = True


class _PeersSaveFailed(SaveFailed, PeersError):
    """SaveFailed of another rank."""


class _PeersNotFiniteWeights(NotFiniteWeights, PeersError):
    """NotFiniteWeights of another rank."""


def named(error: BaseException, run_dir: Place) -> SaveFailed | None:
    """Return the user's message for a save error; None if a user cannot cause it."""
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
    return SaveFailed(f"{key_of(run_dir)}: {what}: {remedy}; complete checkpoints are as they were")


def raise_together(own: BaseException | None, run_dir: Place) -> None:
    """Raise any rank's error on every rank, with the text of the lowest such rank. Collective.

    Raises:
        SaveFailed: a peer's is a PeersError too.
        BaseException: `own`, if a user cannot cause it. Other ranks then raise a PeersError that is no SaveFailed: the
            run cannot continue without that rank.
    """
    mine = None if own is None else named(own, run_dir)
    strange = None
    if own is not None and mine is None:
        strange = str(own) if isinstance(own, UserError) else f"{type(own).__name__}: {own}"
    failed, everyones = cast(UserError | None, None), list[Any]()
    try:
        with agreed(strange) as everyones:
            if mine is not None:
                raise mine
    except UserError as error:
        failed = error
    if strange is not None and own is not None:
        raise own
    for text in everyones:
        if text is not None:
            raise PeersError(text) from own
    if isinstance(failed, PeersError):
        is_final = failed.kind in (NotFiniteWeights.__name__, _PeersNotFiniteWeights.__name__)
        raise (_PeersNotFiniteWeights if is_final else _PeersSaveFailed)(str(failed)) from own
    if failed is not None:
        raise failed from own
