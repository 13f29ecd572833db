"""Whether ranks that each read the shards themselves (`data.stream`) have read the same samples."""

from collections.abc import Sequence

PARTS = 3
"""Numbers that are summed over ranks."""


class SamplesDiffer(RuntimeError):
    """Ranks have read other samples as the same ones."""


def parts_of(digest: int | None) -> tuple[int, int, int]:
    """What is summed over ranks: 1, a part of the digest and its square. Sums n, a and b are those of one part only if
    n * b is a * a. Of None zeros: a rank that has not read the samples says nothing of them."""
    if digest is None:
        return 0, 0, 0
    part = digest % 65536  # so that sums of squares stay whole in float64
    return 1, part, part * part


def require_same(sums: Sequence[float]) -> None:
    """Look at sums of `parts_of` over all ranks.

    Raises:
        SamplesDiffer: the digests are not one.
    """
    number, total, squares = sums
    if number * squares != total * total:
        raise SamplesDiffer(
            f"the {number:.0f} ranks have read different samples for the next step, or before: with data.stream each "
            "rank reads the shards itself, and must get the same bytes in the same order. A command must not depend on "
            "its node or on chance: `tar` of a folder has the order of its file system, and `shuf` its own. Nothing of "
            "this step is saved"
        )
