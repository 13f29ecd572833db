"""Times that the environment sets: how long ranks may take to save and end. Imports no torch."""

import os

from mimo_train.config.errors import UserError


def grace_seconds() -> float:
    """MIMO_GRACE_SECONDS; 120 where it is not set.

    Raises:
        UserError: it is not a positive number.
    """
    return seconds_of("MIMO_GRACE_SECONDS", 120.0)


def seconds_of(variable: str, default: float, *, or_none: bool = False) -> float:
    """A variable of seconds.

    Args:
        or_none: whether 0 is one.

    Raises:
        UserError: it is not such a number.
    """
    text = os.environ.get(variable, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf") or (seconds == 0 and not or_none):
        wanted = "a number of seconds, at least 0" if or_none else "a positive number of seconds"
        raise UserError(f"{variable} is {text!r}: give {wanted}")
    return seconds
