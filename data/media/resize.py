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
    tile: int = 0
    """Side in pixels of the tiles that it is cut into; 0: it is not."""
    background: tuple[int, int, int] = (0, 0, 0)
    """Of a square around a picture that is not cut where others are: red, green, blue."""


STRETCHED = Resize()
"""Both sides become what is asked for, bicubic."""
