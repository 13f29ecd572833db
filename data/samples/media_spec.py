"""What an encoder module needs of the images, videos or audio of a sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from data.errors import DataError
from data.media.options import STRETCHED, Bounds, Resize
from data.text.placeholders import Grid


@dataclass(frozen=True)
class Media:
    """What one encoder module needs of a sample.

    For images `num_tokens`, `size` and `inner_tokens` take (height, width) in pixels of the original; for audio
    (samples per channel, samples per second). All are pure; they may raise ValueError for an item that the encoder
    cannot take.
    """

    module: str
    kind: str  # "image" | "audio"
    placeholder: str
    num_tokens: Callable[[int, int], int]
    """Tokens that one image or clip takes in the sequence."""
    size: Callable[[int, int], tuple[int, int]]
    """What the encoder gets: (height, width); for audio (samples, samples per second)."""
    inner_tokens: Callable[[int, int], int] | None = None
    """Tokens that one image or clip takes inside the encoder's layers; None: as many as in the sequence."""
    pairs: Callable[[int, int], int] | None = None
    """Pairs of tokens of one image or clip that attend to each other, in a layer on average; None: all."""
    resize: Resize = STRETCHED
    """How an image becomes one of `size`."""
    grid: Callable[[int, int], Grid | None] | None = None
    """Rows and columns of the tokens of one image, for a language model with positions on three axes; None for any
    other language model. It gives None where the tokens form no grid."""
    canvas: Callable[[int, int], tuple[int, int]] | None = None
    """Where images are cut into tiles: (height, width) of what is cut; (0, 0) where nothing is. `size` is then the
    image's own."""
    cut_several: bool = True
    """True if images of a sample with several are cut into tiles too; else all functions get (0, 0) for these."""

    def __post_init__(self) -> None:
        if self.kind not in ("image", "audio"):
            raise DataError(f"modules.{self.module}: media kind {self.kind!r} is neither 'image' nor 'audio'")

    @property
    def field(self) -> str:
        """Name of its tensor in a batch."""
        return "pixels" if self.kind == "image" else "waveforms"

    def extents(self, extents: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """What the functions get for each of a sample's media of this kind, from their own extents."""
        return [(0, 0)] * len(extents) if not self.cut_several and len(extents) > 1 else list(extents)

    def above(self, own: tuple[int, int], extent: tuple[int, int], bounds: Bounds) -> str | None:
        """What is too large of what is made of an image on its way, None if nothing is.

        Args:
            own: its (height, width); extent: what the functions get for it.
        """
        return bounds.of_resized(*self.resize.largest(*own, cut=min(extent) > 0)) if self.kind == "image" else None

    def blank_shape(self, extent: tuple[int, int]) -> tuple[int, ...]:
        """Shape of an image's or clip's tensor."""
        first, second = self.size(*extent)
        if self.kind == "audio":
            return (first,)
        if self.canvas is None:
            return 3, first, second
        height, width = self.canvas(*extent)
        side = self.resize.tile
        return 1 + height * width // side**2, 3, side, side
