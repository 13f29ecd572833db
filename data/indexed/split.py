"""`data.split`: which documents of a .bin and .idx file are trained on, and which are held out."""

from __future__ import annotations

from data.errors import DataError

Part = tuple[float, float]
"""From which share of a file's documents on, and up to which."""
WHOLE: Part = (0.0, 1.0)


def split_parts(text: str) -> tuple[Part, Part]:
    """(documents to train on, held-out ones) of `969,30,1`: shares for training, validation and test, over their sum,
    in the order of the file. Those of a test are read by nobody.

    Raises:
        DataError: it is not that.
    """
    try:
        shares = [float(one) for one in text.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or not all(0 <= share < float("inf") for share in shares) or not shares[0]:
        raise DataError(
            f"{text!r} is none: give shares of documents for training, validation and test, such as 969,30,1"
        )
    total = sum(shares)
    # Summed up as Megatron-LM does, so that they are its documents to the last one.
    trained = shares[0] / total
    held = trained + (shares[1] / total if len(shares) > 1 else 0.0)
    return (0.0, trained), (trained, held)
