"""How a picture becomes one of another size. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Resize:
    """How a picture becomes one of `Media.size`."""

    interpolation: str = "bicubic"
    """`bicubic` or `bilinear`, both with antialiasing."""
    shortest_edge: int = 0
    """Pixels that the shorter side gets before the middle is cut out; 0: nothing is cut, both sides are resized to what
    they become."""


STRETCHED = Resize()
"""Both sides become what is asked for, bicubic."""
