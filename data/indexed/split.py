"""`data.split`: the training and held-out documents of a .bin and .idx file."""

from __future__ import annotations

from data.errors import DataError

Part = tuple[float, float]
"""First and last share of a file's documents."""
WHOLE: Part = (0.0, 1.0)


def split_parts(text: str) -> tuple[Part, Part]:
    """Return the parts (training, held-out) of a split such as `969,30,1`: shares for training, validation and test.

    The test part is not read. Raises DataError if the text is not a split.
    """
    try:
        shares = [float(number) for number in text.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or not all(0 <= share < float("inf") for share in shares) or not shares[0]:
        raise DataError(
            f"{text!r} is none: give shares of documents for training, validation and test, such as 969,30,1"
        )
    total = sum(shares)
    # Summed as in Megatron-LM, for exactly the same documents.
    trained = shares[0] / total
    held_out = trained + (shares[1] / total if len(shares) > 1 else 0.0)
    return (0.0, trained), (trained, held_out)
