"""Sizes of published vision towers: a layer of them is read, and images may be cut into tiles."""

import math
from dataclasses import dataclass
from typing import ClassVar

from encoders.base import ImageTransform
from encoders.errors import EncoderError
from encoders.key_rules import MOST_LAYERS, MOST_PIXELS, key
from encoders.native.vit.patch_spec import PatchSpec
from encoders.native.vit.tiles import POOLED_FROM, UNCUT, Tiling, best_canvas, tiling


@dataclass
class TowerSpec(PatchSpec):
    """Base of the specs of published encoders, of which one layer's output is read."""

    feature_layer: int = key(-1, at_least=-MOST_LAYERS, at_most=-1)
    """Layer whose output is read: -1 is the last, -2 the one before. Layers after it are not built."""
    final_norm: bool = True
    """Apply the norm after the last layer to the features."""
    grid_pinpoints: list[list[int]] = key(factory=list, at_least=1, at_most=MOST_PIXELS)
    """With `resize: tiles`, which reads an image as `fixed` does and again cut into tiles: (height, width) in pixels of
    the canvases to choose from, multiples of `image_size`. Needs `projector.newline`."""
    max_tiles: int = key(0, at_least=0, at_most=10_000, zero_means="none are")
    """With `tiles`: average the features of clearly more tiles down to about this many; 0: never."""
    cut_several: bool = True
    """With `tiles`: cut each of several images too. `false`: read each once."""

    resizes: ClassVar[tuple[str, ...]] = ("fixed", "crop", "native", "tiles")

    @property
    def sizes_vary(self) -> bool:
        return self.is_tiled or super().sizes_vary

    @property
    def transform(self) -> ImageTransform:
        if not self.is_tiled:
            return super().transform
        red, green, blue = (int(255 * mean) for mean in self.pixel_mean)
        ground = red, green, blue
        return ImageTransform(self.interpolation, tile=self.image_size, background=ground, rounded=self.rounded_pixels)

    def canvas(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) in pixels of the canvas that is cut into tiles; `UNCUT` without one. Raise
        EncoderError if the image is so long that nothing of it would be left."""
        if (height, width) == UNCUT:
            return UNCUT
        canvas = best_canvas(height, width, self.grid_pinpoints)
        if canvas == UNCUT:
            raise EncoderError(f"an image of {height} x {width} pixels is too long for every one of grid_pinpoints")
        return canvas

    def tiling(self, height: int, width: int, /) -> Tiling:
        """Return the tiling of an image of `height` x `width` pixels. Raise EncoderError as `canvas`."""
        canvas = self.canvas(height, width)
        if canvas == UNCUT:
            return Tiling(0, 0, self._side)
        result = tiling(height, width, canvas, self.image_size, self._side, self.max_tiles)
        if result.pooled and min(result.pooled) < 1:
            raise EncoderError(f"an image of {height} x {width} pixels is too long: no line of features would be left")
        return result

    def input_size(self, height: int, width: int, /, merge: int = 1) -> tuple[int, ...]:
        """Return the encoder's input size as in `PatchSpec`. With resize tiles it is the image's own, which determines
        its `tiling`."""
        if not self.is_tiled:
            return super().input_size(height, width, merge)
        self.tiling(height, width)
        return height, width

    def grid(self, height: int, width: int, merge: int = 1) -> tuple[int, int]:
        """Return the patch grid as in `PatchSpec`; with resize tiles, of a tile."""
        return (self._side, self._side) if self.is_tiled else super().grid(height, width, merge)

    def inner_tokens(self, height: int, width: int, /, merge: int = 1) -> int:
        """Return the tokens of an image inside the encoder, of all tiles together."""
        tokens = super().inner_tokens(height, width, merge)
        return tokens * self.tiling(height, width).tiles if self.is_tiled else tokens

    def attention_pairs(self, height: int, width: int, /, merge: int = 1) -> int:
        """Return the number of token pairs that attend to each other; with tiles, only inside each tile."""
        if not self.is_tiled:
            return super().attention_pairs(height, width, merge=merge)
        return self.inner_tokens(height, width) * self.token_unit()

    def num_tokens(self, height: int, width: int, /, merge: int = 1) -> int:
        return self.tiling(height, width).tokens if self.is_tiled else super().num_tokens(height, width, merge)

    def most_features(self, merge: int = 1) -> int:
        return self._most_tiles * self._side**2 if self.is_tiled else self.most_tokens(merge)

    def most_tokens(self, merge: int = 1) -> int:
        """Return the tokens in the sequence of the largest image; with resize tiles an upper bound."""
        if not self.is_tiled:
            return super().most_tokens(merge)
        tile, counts = self._side**2, []
        bound = POOLED_FROM**2 * self.max_tiles * tile if self.max_tiles else math.inf
        for height, width in self.grid_pinpoints:
            rows, columns = height // self.image_size, width // self.image_size
            counts.append(tile + math.floor(min(rows * columns * tile, bound)) + rows * self._side)
        return max(counts)

    def most_inner_tokens(self, merge: int = 1) -> int:
        return self._most_tiles * self.token_unit() if self.is_tiled else super().most_inner_tokens(merge)

    def token_unit(self, merge: int = 1) -> int:
        """Return a divisor of the number of tokens of any image inside the encoder: with tiles, that of one tile."""
        return self._side**2 + self.leading_tokens if self.is_tiled else super().token_unit(merge)

    def describe_input(self, merge: int) -> tuple[str, str, str]:
        if not self.is_tiled:
            return super().describe_input(merge)
        return (
            f"whole and in up to {self._most_tiles - 1} tiles of {self.image_size} x {self.image_size} pixels",
            f"{self._side} x {self._side} patches of a tile",
            f"up to {self.most_tokens()}",
        )

    def faults(self) -> list[tuple[str, str]]:
        faults = super().faults()
        if not self.is_tiled:
            is_set = {"grid_pinpoints": bool(self.grid_pinpoints), "max_tiles": self.max_tiles != 0}
            is_set["cut_several"] = not self.cut_several
            return faults + [
                (name, f"is {getattr(self, name)}, and resize {self.resize} cuts no tiles: remove it")
                for name, value in is_set.items()
                if value
            ]
        if not self.grid_pinpoints:
            faults.append(
                ("grid_pinpoints", "is empty, and resize is tiles: give sizes such as [[336, 672], [672, 336]]")
            )
        for size in self.grid_pinpoints:
            if len(size) != 2 or min(size) < 1 or any(side % self.image_size for side in size):
                text = f"has {size}, and tiles of {self.image_size} x {self.image_size} pixels (image_size) make "
                faults.append(("grid_pinpoints", f"{text}multiples of that, (height, width): change it"))
        return faults

    def joint_faults(self, merge: int) -> list[tuple[str, str]]:
        if self.is_tiled and merge > 1:
            return [
                ("projector.merge", f"is {merge}, and with encoder.resize tiles patches are not joined: set it to 1")
            ]
        if self.is_tiled and self.keep_class_token:
            text = "a class token in the sequence needs images in one piece, resize is tiles: set it to false"
            return [("encoder.keep_class_token", text)]
        return super().joint_faults(merge)

    @property
    def _side(self) -> int:
        """Features on a line of a tile."""
        return self.image_size // self.patch_size

    @property
    def _most_tiles(self) -> int:
        """Tiles of the largest canvas, and that of the whole image."""
        areas: list[int] = [height * width for height, width in self.grid_pinpoints]
        return 1 + max(areas) // self.image_size**2
