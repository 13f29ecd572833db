"""How long ranks may take to save and end. Imports no torch."""

import os

from mimo_train.config.fault import UserError


def grace_seconds() -> float:
    """MIMO_GRACE_SECONDS; 120 where it is not set.

    Raises:
        UserError: it is not a positive number.
    """
    text = os.environ.get("MIMO_GRACE_SECONDS", "120")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UserError(f"MIMO_GRACE_SECONDS is {text!r}: give a positive number of seconds")
    return seconds
