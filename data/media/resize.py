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
    rounded: bool = True
    """Whether resized pixels are rounded to whole numbers (uint8); otherwise they are float32, from 0 to 255."""

    def whole(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) of a picture before its middle is cut out, from its own."""
        shortest = min(height, width)
        return self.shortest_edge * height // shortest, self.shortest_edge * width // shortest

    def largest(self, height: int, width: int, cut: bool = True) -> tuple[int, int]:
        """(height, width) of what is made of a picture on its way and may be far larger than it and than what is read:
        what its middle is cut out of, or the square around a picture that is not `cut` into tiles. Its own where
        neither is made."""
        if self.tile and not cut:
            return max(height, width), max(height, width)
        return self.whole(height, width) if self.shortest_edge else (height, width)


STRETCHED = Resize()
"""Both sides become what is asked for, bicubic."""
