"""Sizes of the vision towers of CLIP, SigLIP and SigLIP 2."""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from encoders.key_rules import MOST_PIXELS, key
from encoders.native.vit.tower import TowerSpec
from encoders.pretrained import CLIP_MEAN, CLIP_STD


@dataclass
class ClipSpec(TowerSpec):
    """The vision tower of CLIP (Radford et al. 2021, arXiv 2103.00020). LLaVA-1.5 uses `feature_layer: -2`."""

    name: str = "clip"
    family: str = "clip"
    resize: str = "crop"
    layernorm_epsilon: float = key(1e-5, above=0, below=1)
    activation: str = "quick_gelu"
    """`quick_gelu` in OpenAI's models, `gelu` in most of LAION's."""
    keep_class_token: bool = False
    """Keep the class token in the sequence, before the patches."""
    final_norm: bool = False
    """Apply the norm after the last layer, which CLIP has for the class token only."""
    pixel_mean: list[float] = key(factory=lambda: list(CLIP_MEAN), at_least=-1e6, at_most=1e6)
    pixel_std: list[float] = key(factory=lambda: list(CLIP_STD), above=0, at_most=1e6)

    pre_norm = True
    patch_bias = False
    class_token = True
    class_token_dims = 1
    class_position = True


@dataclass
class SiglipSpec(TowerSpec):
    """The vision tower of SigLIP (Zhai et al. 2023, arXiv 2303.15343), and of SigLIP 2 with images of one size. Its
    pooling head is not built."""

    name: str = "siglip"
    family: str = "siglip"
    patch_size: int = key(16, at_least=1, at_most=MOST_PIXELS)
    """Side of a patch in pixels. Pixels left over at the right and lower edge are not read."""
    activation: str = "gelu_tanh"

    whole_patches = False


@dataclass
class Siglip2Spec(TowerSpec):
    """The vision tower of SigLIP 2 NaFlex (Tschannen et al. 2025, arXiv 2502.14786). Images keep their aspect ratio."""

    name: str = "siglip2"
    family: str = "siglip2"
    resize: str = "native"
    """`native` only."""
    image_size: int = key(256, at_least=1, at_most=MOST_PIXELS)
    """Side in pixels of the grid of learned positions."""
    max_patches: int = key(256, at_least=1, at_most=2**24)
    """Most patches of an image. Images are resized to nearly this many."""
    interpolation: str = "bilinear"
    activation: str = "gelu_tanh"

    channels_last = True
    position_resize = "bilinear"
    position_antialias = True

    @property
    def largest_area(self) -> int:
        return self.max_patches * self.patch_size**2

    def input_size(self, height: int, width: int, merge: int = 1) -> tuple[int, int]:
        """Return the (height, width) in pixels of the encoder's input. Both sides are scaled by the largest factor for
        which they, rounded up to multiples of patch_size * merge, hold at most `max_patches`."""
        unit = self.patch_size * merge
        rows, columns = _largest_grid(height, width, unit, self.max_patches // merge**2)
        return rows * unit, columns * unit

    def faults(self) -> list[tuple[str, str]]:
        faults = super().faults()
        if self.resize != "native":
            faults.append(("resize", f"must be native, is {self.resize!r}: images of one size are family siglip"))
        faults += [
            (name, f"is {getattr(self, name)}, and the size of images follows from max_patches: set it to 0")
            for name in ("min_pixels", "max_pixels")
            if getattr(self, name)
        ]
        return faults

    def joint_faults(self, merge: int) -> list[tuple[str, str]]:
        if self.max_patches < merge**2:
            text = f"{self.max_patches} patches make no token of {merge} x {merge} (projector.merge): raise it"
            return [("encoder.max_patches", text)]
        return []


@lru_cache(maxsize=65536)
def _largest_grid(height: int, width: int, unit: int, most: int) -> tuple[int, int]:
    """Return (rows, columns) of an image, see `Siglip2Spec.input_size`. Bisection between 1e-6 and 100 to 1e-5 finds
    the factor, as in the published preprocessing: another precision changes the grid of some images."""

    def grid(scale: float) -> tuple[int, int]:
        rows, columns = (max(1, ceil(side * scale / unit)) for side in (height, width))
        return rows, columns

    low, high = 1e-6, 100.0
    while high - low >= 1e-5:
        middle = (low + high) / 2
        rows, columns = grid(middle)
        low, high = (middle, high) if rows * columns <= most else (low, middle)
    return grid(low)
