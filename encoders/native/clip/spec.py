"""Sizes of the vision towers of CLIP, SigLIP and SigLIP 2."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING, Any

from encoders.errors import EncoderError
from encoders.key_rules import MOST_PIXELS, key
from encoders.native.vit.tiles import Tiling, video_tiling
from encoders.native.vit.tower import TowerSpec
from encoders.pretrained import CLIP_MEAN, CLIP_STD
from encoders.transformers_media.video_keys import VideoKeys

if TYPE_CHECKING:
    from encoders.transformers_media.frame_resizing import Decode


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
class SiglipSpec(VideoKeys, TowerSpec):
    """The vision tower of SigLIP (Zhai et al. 2023, arXiv 2303.15343), and of SigLIP 2 with images of one size. Its
    pooling head is not built. With `resize: tiles`, as in LLaVA-OneVision, it may read videos."""

    name: str = "siglip"
    family: str = "siglip"
    patch_size: int = key(16, at_least=1, at_most=MOST_PIXELS)
    """Side of a patch in pixels. Pixels left over at the right and lower edge are not read."""
    activation: str = "gelu_tanh"

    whole_patches = False
    axes = False

    def tiling(self, *extent: int) -> Tiling:
        """Return the tiling of an image or video. Raise EncoderError as `canvas`."""
        if len(extent) > 2:
            return video_tiling(len(self.video_frames(*extent)), self._side)
        return super().tiling(*extent)

    def input_size(self, *extent: int, merge: int = 1) -> tuple[int, ...]:
        """Return the size of an image in the encoder; of a video its extent, which determines its `tiling`."""
        return super().input_size(*extent, merge=merge) if len(extent) == 2 else extent

    def inner_tokens(self, *extent: int, merge: int = 1) -> int:
        if len(extent) == 2:
            return super().inner_tokens(*extent, merge=merge)
        return self.tiling(*extent).tiles * self.token_unit()

    def attention_pairs(self, *extent: int, merge: int = 1) -> int:
        if len(extent) == 2:
            return super().attention_pairs(*extent, merge=merge)
        return self.inner_tokens(*extent) * self.token_unit()

    def num_tokens(self, *extent: int, merge: int = 1) -> int:
        return super().num_tokens(*extent, merge=merge) if len(extent) == 2 else self.tiling(*extent).tokens

    def text(self, *extent_and_number: int) -> tuple[str, Sequence[int], str]:
        """Return the text of an image or video by its extent, followed by its number in the sample."""
        *extent, number = extent_and_number
        if len(extent) > 2:
            return self.videos().text(extent, number)
        return "", [self.pad] * self.num_tokens(*extent), ""

    def read_video(self, decode: "Decode", extent: Sequence[int], parts: Sequence[int]) -> list[Any]:
        """Return the frames of a video as tiles, uint8 [frames, 3, image_size, image_size]."""
        tiles = self.videos().resized(decode(self.video_frames(*extent)), extent)
        if tiles.shape[1:] != (3, self.image_size, self.image_size):
            sides = f"{[*tiles.shape[2:]]} pixels, and image_size is {self.image_size}"
            raise EncoderError(f"the video processor makes frames of {sides}. Set encoder.reads_videos=false")
        return [tiles]

    def faults(self) -> list[tuple[str, str]]:
        if faults := super().faults() or self.video_faults():
            return faults
        if not self.reads_videos:
            return []
        if not self.is_tiled:
            return [("reads_videos", f"is true, and resize is {self.resize}: only tiles read videos. Set it to false")]
        from encoders.transformers_media.videos import EXAMPLE

        text = ""
        try:
            ours, theirs = self.num_tokens(*EXAMPLE), self.videos().rows(*EXAMPLE)
        except EncoderError as error:
            return [("reads_videos", f"is true, and {error}. Set it to false")]
        if self.videos().normalization != (self.pixel_mean, self.pixel_std):
            text = "video frames are normalized differently from images"
        elif ours != theirs:
            text = f"the processor makes {theirs} tokens of {len(self.video_frames(*EXAMPLE))} frames, the model {ours}"
        return [("reads_videos", f"is true, and {text}. Set it to false")] if text else []


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
