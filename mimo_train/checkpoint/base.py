"""The checkpoint with the weights that one of trained weights alone leaves out. Imports no torch."""

from data.storage.url import Place, place_of
from mimo_train.checkpoint import folders
from mimo_train.checkpoint.folders import LEFT_OUT
from mimo_train.config.errors import UserError


def base_of(folder: Place, given: str = "") -> Place | None:
    """The checkpoint with the weights that the checkpoint in `folder` leaves out; None if it has all of them, or its
    run began with those of its seed.

    Args:
        given: `checkpoint.weights` of this run, used instead of that of the run that has written it.

    Raises:
        UserError: it is not there any more.
    """
    record = folders.read_record(folder, "config")
    if LEFT_OUT not in record:
        return None
    weights = given or record["config"]["checkpoint"]["weights"]
    if not weights:
        return None
    found = folders.in_folder(place_of(weights), "checkpoint.weights")
    if found.resolve() == folder.resolve():
        raise UserError(
            f"checkpoint.weights: {found} has trained weights only, and cannot be its own base: give the weights that "
            "its run began with"
        )
    return found
