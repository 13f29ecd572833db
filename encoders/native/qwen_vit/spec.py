"""Sizes of the vision transformers of Qwen2.5-VL and Qwen3-VL, and the arithmetic derived from them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from encoders.errors import EncoderError
from encoders.key_rules import MOST_LAYERS, MOST_PIXELS, MOST_WIDTH, key
from encoders.native.vit.patch_spec import PatchSpec
from encoders.pretrained import CLIP_MEAN, CLIP_STD
from encoders.transformers_media.video_keys import VideoKeys

if TYPE_CHECKING:
    import torch

    from encoders.transformers_media.frame_resizing import Decode

LONGEST = 200
"""Maximum ratio of an image's longer side to its shorter side."""


@dataclass
class _QwenSpec(VideoKeys, PatchSpec):
    """Images of their own ratio, rotary positions by row and column, and still images as two equal frames. Of a video,
    two frames are an image."""

    resize: str = "native"
    """`native` only."""
    num_attention_heads: int = key(16, at_least=1, at_most=MOST_WIDTH)
    """Attention heads."""
    rotary_base: float = key(10000.0, above=0)
    """Base of the rotary frequencies."""

    patch_frames = 2
    rotary_positions = True

    def input_size(self, *extent: int, merge: int = 1) -> tuple[int, int]:
        """Return the size of `nearest_size`; of a video that of its frames."""
        if len(extent) > 2:
            _, rows, columns = self.video_grid(*extent)
            return rows * self.patch_size, columns * self.patch_size
        height, width = extent
        return nearest_size(height, width, self.patch_size * merge, self.min_pixels, self.largest_area)

    def video_grid(self, *extent: int) -> tuple[int, int, int]:
        """Return the patches of a video in time, height and width."""
        time, rows, columns = self.videos().sizes(*extent)["video_grid_thw"][0].tolist()
        return time, rows, columns

    def video_parts(self, *extent: int) -> int:
        """Return the number of images of two frames that a video becomes."""
        return self.video_grid(*extent)[0]

    def inner_tokens(self, *extent: int, merge: int = 1) -> int:
        if len(extent) > 2:
            return math.prod(self.video_grid(*extent))
        height, width = extent
        return super().inner_tokens(height, width, merge=merge)

    def num_tokens(self, *extent: int, merge: int = 1) -> int:
        return self.inner_tokens(*extent, merge=merge) // merge**2

    def token_grid(self, *extent: int, merge: int = 1) -> tuple[int, int] | None:
        return super().token_grid(*extent, merge=merge) if len(extent) == 2 else None

    def attention_pairs(self, *extent: int, merge: int = 1) -> int:
        if len(extent) > 2:
            times, rows, columns = self.video_grid(*extent)
            return times * self.pairs(rows, columns, merge)
        height, width = extent
        return self.pairs(*self.grid(height, width, merge), merge)

    def pairs(self, rows: int, columns: int, merge: int) -> int:
        """Return the pairs of patches of an image of `rows` x `columns` that attend to each other, averaged over
        layers."""
        return (rows * columns) ** 2

    def output_tokens(self, *extent: int) -> int:
        return self.num_tokens(*extent, merge=self.videos().merge)

    def image_sizes(self, *extent: int) -> "dict[str, torch.Tensor]":
        import torch

        height, width = extent
        return {"image_grid_thw": torch.tensor([[1, *self.grid(height, width, self.videos().merge)]])}

    def text(self, *extent_and_number: int) -> tuple[str, Sequence[int], str]:
        """Return the text of an image or video by its extent, followed by its number in the sample."""
        *extent, number = extent_and_number
        if len(extent) == 2:
            return "", [self.pad] * self.output_tokens(*extent), ""
        return self.videos().text(extent, number)

    def read_video(self, decode: "Decode", extent: Sequence[int], parts: Sequence[int]) -> list[Any]:
        """Return pairs of resized frames, each uint8 [6, height, width]: see `VideoProcessor.frame_pairs`."""
        return list(self.videos().frame_pairs(decode, extent, parts).flatten(1, 2))

    def faults(self) -> list[tuple[str, str]]:
        faults = super().faults()
        if self.resize != "native":
            faults.append(("resize", f"must be native, is {self.resize!r}"))
        faults += self.rotary_faults() + self.video_faults()
        if not faults and self.reads_videos and self.videos().normalization != (self.pixel_mean, self.pixel_std):
            options = "do_rescale, rescale_factor, do_normalize, image_mean, image_std"
            if is_changed := any(name in self.video for name in options.split(", ")):
                text = f"frames must be normalized as images are. Remove {options}"
            else:
                text = f"is true, and video frames are normalized differently from images ({options}). Set it to false"
            faults.append(("video" if is_changed else "reads_videos", text))
        return faults


@dataclass
class QwenVitSpec(_QwenSpec):
    """The vision transformer of Qwen2.5-VL (Bai et al. 2025, arXiv 2502.13923, section 2.1.1): rotary positions, window
    attention in most layers. Its patch merger is the final norm and a projector `{kind: mlp, merge: 2, activation:
    gelu}` of the merged width."""

    name: str = "qwen_vit"
    family: str = "qwen_vit"
    image_size: int = key(1008, at_least=1, at_most=MOST_PIXELS)
    """Its square is the largest area in pixels if `max_pixels` is 0."""
    min_pixels: int = key(3136, at_least=0)
    max_pixels: int = key(1003520, at_least=0)
    patch_size: int = key(14, at_least=1, at_most=MOST_PIXELS)
    """Side of a patch in pixels. Must divide `image_size` and `window_size`."""
    window_size: int = key(112, at_least=1, at_most=MOST_PIXELS)
    """Side in pixels of the windows in which layers attend."""
    full_attention: list[int] = key(factory=lambda: [7, 15, 23, 31], at_least=0)
    """Layers, counted from 0, that attend to the whole image."""
    hidden_size: int = key(1280, at_least=1, at_most=MOST_WIDTH)
    num_layers: int = key(32, at_least=1, at_most=MOST_LAYERS)
    ffn_hidden_size: int = key(3420, at_least=1, at_most=MOST_WIDTH)
    activation: str = "swiglu"
    pixel_mean: list[float] = key(factory=lambda: list(CLIP_MEAN), at_least=-1e6, at_most=1e6)
    pixel_std: list[float] = key(factory=lambda: list(CLIP_STD), above=0, at_most=1e6)

    normalization = "RMSNorm"
    patch_bias = False
    learned_positions = False

    def window_tokens(self, rows: int, columns: int, merge: int) -> list[int]:
        """Return the tokens in each window of an image of `rows` x `columns` patches, in row order."""
        side = self.window_size // self.patch_size // merge
        heights, widths = (
            [min(side, count // merge - at) for at in range(0, count // merge, side)] for count in (rows, columns)
        )
        return [height * width * merge**2 for height in heights for width in widths]

    def pairs(self, rows: int, columns: int, merge: int) -> int:
        full = len(self.full_attention)
        windows = sum(tokens**2 for tokens in self.window_tokens(rows, columns, merge))
        return (full * (rows * columns) ** 2 + (self.num_layers - full) * windows) // self.num_layers

    def faults(self) -> list[tuple[str, str]]:
        faults = super().faults()
        if self.patch_size > 0 and (self.window_size < self.patch_size or self.window_size % self.patch_size):
            text = f"{self.window_size} is no multiple of patch_size {self.patch_size}: change one of them"
            faults.append(("window_size", text))
        if set(self.full_attention) - set(range(self.num_layers)) or len(set(self.full_attention)) != len(
            self.full_attention
        ):
            text = f"must name layers from 0 to {self.num_layers - 1}, each once, is {self.full_attention}"
            faults.append(("full_attention", text))
        return faults

    def joint_faults(self, merge: int) -> list[tuple[str, str]]:
        faults = super().joint_faults(merge)
        if self.window_size // self.patch_size < merge:
            text = f"a window of {self.window_size} pixels holds no token of {merge} x {merge} patches: raise it"
            faults.append(("encoder.window_size", text))
        return faults


def nearest_size(height: int, width: int, unit: int, least: int, most: int) -> tuple[int, int]:
    """Return (height, width) in pixels of a resized image: the nearest multiples of `unit`. If the area is outside of
    `least` to `most` pixels, both sides are first scaled by one factor.

    Raises:
        EncoderError: the image is too long for its width, or does not fit the largest area.
    """
    if max(height, width) > LONGEST * min(height, width):
        raise EncoderError(f"an image of {height} x {width} pixels is more than {LONGEST} times longer than wide")
    # Halves round to the even number, as in the published preprocessing.
    rows, columns = round(height / unit), round(width / unit)
    if rows * columns * unit**2 > most:
        scale = math.sqrt(height * width / most)
        rows, columns = (max(1, math.floor(side / scale / unit)) for side in (height, width))
    elif rows * columns * unit**2 < least:
        scale = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(side * scale / unit) for side in (height, width))
    if not rows * columns or rows * columns * unit**2 > most:
        raise EncoderError(
            f"an image of {height} x {width} pixels becomes {rows * unit} x {columns * unit}, and encoder."
            f"max_pixels is {most}: raise it, or leave the image out"
        )
    return rows * unit, columns * unit


@dataclass
class Qwen3VitSpec(_QwenSpec):
    """The vision transformer of Qwen3-VL (2025, arXiv 2511.21631): learned and rotary positions, and DeepStack (arXiv
    2406.04334): the first layers of the language model get the states of some encoder layers. Its patch merger is the
    final norm and a projector `{kind: mlp, merge: 2, activation: gelu}` of the merged width."""

    name: str = "qwen3_vit"
    family: str = "qwen3_vit"
    image_size: int = key(768, at_least=1, at_most=MOST_PIXELS)
    """Side in pixels of the grid of learned positions. Its square is the largest area if `max_pixels` is 0."""
    min_pixels: int = key(65536, at_least=0)
    max_pixels: int = key(16777216, at_least=0)
    hidden_size: int = key(1152, at_least=1, at_most=MOST_WIDTH)
    num_layers: int = key(27, at_least=1, at_most=MOST_LAYERS)
    ffn_hidden_size: int = key(4304, at_least=1, at_most=MOST_WIDTH)
    activation: str = "gelu_tanh"
    deepstack: list[int] = key(factory=lambda: [8, 16, 24], at_least=0)
    """Layers, counted from 0, whose states go to the first layers of the language model."""
    deepstack_width: int = key(4096, at_least=1, at_most=MOST_WIDTH)
    """Width of the features of `deepstack`: the language model's `hidden_size`."""
    merge_size: int = key(2, at_least=1, at_most=64)
    """Side of the squares of patches that become one feature. Must equal `projector.merge`."""

    position_resize = "bilinear"
    position_corners = True

    @property
    def merged_width(self) -> int:
        """Width of a token's patches, side by side."""
        return self.hidden_size * self.merge_size**2

    def num_parameters(self) -> int:
        width, out = self.merged_width, self.deepstack_width
        return super().num_parameters() + len(self.deepstack) * (2 * width + width * (width + 1) + out * (width + 1))

    def embedding_products(self) -> dict[str, int]:
        """Return {weight outside of the layers: its multiplications for one patch}."""
        width, squares = self.merged_width, self.merge_size**2
        products = super().embedding_products()
        for number in range(len(self.deepstack)):
            products[f"deepstack.{number}.linear_fc1.weight"] = width * width // squares
            products[f"deepstack.{number}.linear_fc2.weight"] = width * self.deepstack_width // squares
        return products

    def joint_faults(self, merge: int) -> list[tuple[str, str]]:
        faults = super().joint_faults(merge)
        if merge != self.merge_size:
            text = f"{merge} is not encoder.merge_size {self.merge_size}: the projector and the mergers of deepstack "
            faults.append(("projector.merge", f"{text}join the same squares"))
        return faults

    def faults(self) -> list[tuple[str, str]]:
        faults = super().faults()
        if set(self.deepstack) - set(range(self.num_layers)) or sorted(set(self.deepstack)) != self.deepstack:
            text = f"must name layers from 0 to {self.num_layers - 1} in order, each once, is {self.deepstack}"
            faults.append(("deepstack", text))
        return faults
