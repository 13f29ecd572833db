"""Sizes of transformers over the patches of images, and the arithmetic derived from them."""

import math
from dataclasses import dataclass
from typing import ClassVar

from encoders.base import ImageTransform, LayeredSpec
from encoders.key_rules import MOST_LAYERS, MOST_PIXELS, MOST_WIDTH, FixedKeys, key


@dataclass
class PatchSpec(FixedKeys, LayeredSpec):
    """Base of the specs of all transformers over patches, with their common keys. Attributes without an annotation are
    properties of a family. If the user may choose one, the family has a field of that name."""

    name: str = "vit"
    """Free name, shown in tables."""
    family: str = "vit"
    """Family of encoders, whose code builds it."""
    resize: str = "fixed"
    """Resizing. `fixed`: to `image_size` x `image_size`. `crop`: the shorter side to `shortest_edge`, then cut out the
    middle. `native`: keep the aspect ratio; sides become multiples of `patch_size * merge`."""
    image_size: int = key(224, at_least=1, at_most=MOST_PIXELS)
    """Side in pixels of the grid of learned positions; with `fixed` or `crop`, of every image."""
    shortest_edge: int = key(0, at_least=0, at_most=MOST_PIXELS)
    """With `crop`: shorter side before cutting; 0: `image_size`."""
    interpolation: str = "bicubic"
    """`bicubic` or `bilinear`, both with antialiasing."""
    min_pixels: int = key(0, at_least=0)
    """With `native`: enlarge smaller images to about this area."""
    max_pixels: int = key(0, at_least=0)
    """With `native`: reduce larger images to this area; 0: `image_size` squared."""
    patch_size: int = key(16, at_least=1, at_most=MOST_PIXELS)
    """Side of a patch in pixels. Must divide `image_size`."""
    hidden_size: int = key(768, at_least=1, at_most=MOST_WIDTH)
    """Width of the residual stream."""
    num_layers: int = key(12, at_least=1, at_most=MOST_LAYERS)
    """Transformer layers."""
    num_attention_heads: int = key(12, at_least=1, at_most=MOST_WIDTH)
    """Attention heads."""
    ffn_hidden_size: int = key(3072, at_least=1, at_most=MOST_WIDTH)
    """Width of the feed-forward block."""
    layernorm_epsilon: float = key(1e-6, above=0, below=1)
    """Epsilon of every norm."""
    activation: str = "gelu"
    """`gelu`, `gelu_tanh`, `quick_gelu`, `relu`, `silu`, or `swiglu` (gated)."""
    dropout: float = key(0.0, at_least=0, below=1)
    """Dropout probability of hidden states and attention."""
    init_std: float = key(0.02, at_least=0, at_most=1000)
    """Standard deviation of the initial weights."""
    pixel_mean: list[float] = key(factory=lambda: [0.5, 0.5, 0.5], at_least=-1e6, at_most=1e6)
    """Mean per channel, of pixels in [0, 1]."""
    pixel_std: list[float] = key(factory=lambda: [0.5, 0.5, 0.5], above=0, at_most=1e6)
    """Standard deviation per channel, of pixels in [0, 1]."""

    kind: ClassVar[str] = "image"
    medium: ClassVar[str] = "image"
    placeholder: ClassVar[str] = "<image>"
    resizes: ClassVar[tuple[str, ...]] = ("fixed", "crop", "native")
    """Allowed values of `resize`."""
    rounded_pixels = True
    """True if resized pixels are integers, as in the published preprocessing of most families."""
    whole_patches = True
    """True if patches must cover an image; otherwise pixels left over at its right and lower edge are not read."""
    pre_norm = False
    """True if a norm precedes the first layer."""
    patch_bias = True
    patch_frames = 1
    """Number of times that an image is repeated: the kernel over patches spans so many frames."""
    channels_last = False
    """True if the values of a patch are in the order (row, column, channel), not (channel, row, column)."""
    class_token = False
    class_token_dims = 2
    """Dimensions of the class token, all of length 1 but the last, as in the published weights."""
    embedding_dims = 2
    """Dimensions of positions and register tokens; with 3 the first has length 1."""
    keep_class_token = False
    register_tokens = 0
    """Learned tokens between the class token and the patches, dropped after the layers."""
    learned_positions = True
    class_position = False
    """True if the class token has a position, before those of the grid."""
    position_size = 0
    """Side in pixels of the grid of learned positions; 0: `image_size`."""
    position_resize = "bicubic"
    """Interpolation of positions to another grid: `bicubic` or `bilinear`."""
    position_antialias = False
    """True if interpolation to a coarser grid averages positions."""
    position_corners = False
    """True if the corners of both grids coincide, instead of the outer edges of their patches."""
    rotary_base = 100.0

    @property
    def sizes_vary(self) -> bool:
        return self.resize == "native"

    @property
    def transform(self) -> ImageTransform:
        edge = (self.shortest_edge or self.image_size) if self.resize == "crop" else 0
        return ImageTransform(self.interpolation, shortest_edge=edge, rounded=self.rounded_pixels)

    @property
    def position_grid(self) -> tuple[int, int]:
        """(rows, columns) of the grid of learned positions."""
        side = (self.position_size or self.image_size) // self.patch_size
        return side, side

    @property
    def leading_tokens(self) -> int:
        return self.class_token + self.register_tokens

    @property
    def kept_tokens(self) -> int:
        return int(self.keep_class_token)

    @property
    def largest_area(self) -> int:
        return self.max_pixels or self.image_size**2

    def input_size(self, height: int, width: int, /, merge: int = 1) -> tuple[int, ...]:
        """Return the (height, width) in pixels in which the encoder gets an image of `height` x `width`. With resize
        native, sides are the nearest multiples of patch_size * merge. Outside of the bounds both sides are first scaled
        by one factor. A side is at least one multiple, so a very long image loses some of its length."""
        if self.resize != "native":
            return self.image_size, self.image_size
        unit, largest = self.patch_size * merge, self.largest_area
        rows, columns = (max(1, math.floor(side / unit + 0.5)) for side in (height, width))
        if rows * columns * unit**2 < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width)) / unit
            rows, columns = math.ceil(height * scale), math.ceil(width * scale)
        if rows * columns * unit**2 > largest:
            scale = math.sqrt(largest / (height * width)) / unit
            rows, columns = (max(1, math.floor(side * scale)) for side in (height, width))
            most = largest // unit**2
            rows, columns = min(rows, most // columns or 1), min(columns, most // rows or 1)
        return rows * unit, columns * unit

    def grid(self, height: int, width: int, merge: int = 1) -> tuple[int, int]:
        """Return (rows, columns) of patches of an image of `height` x `width` pixels, before it is resized."""
        height, width = self.input_size(height, width, merge=merge)
        return height // self.patch_size, width // self.patch_size

    def inner_tokens(self, height: int, width: int, /, merge: int = 1) -> int:
        """Return the tokens of an image inside the encoder: patches, class and register tokens."""
        return math.prod(self.grid(height, width, merge)) + self.leading_tokens

    def num_tokens(self, height: int, width: int, /, merge: int = 1) -> int:
        """Return the tokens of an image in the sequence: patches / merge^2, and the class token if it is kept."""
        rows, columns = self.grid(height, width, merge)
        return (rows // merge) * (columns // merge) + self.kept_tokens

    def token_grid(self, height: int, width: int, /, merge: int = 1) -> tuple[int, int] | None:
        rows, columns = self.grid(height, width, merge)
        return rows // merge, columns // merge

    def joined(self, merge: int) -> int:
        return merge**2

    def most_patches(self, merge: int = 1) -> int:
        """Return the patches of the largest image that layers see."""
        if self.resize != "native":
            return (self.image_size // self.patch_size) ** 2
        return self.largest_area // (self.patch_size * merge) ** 2 * merge**2

    def most_tokens(self, merge: int = 1) -> int:
        return self.most_patches(merge) // merge**2 + self.kept_tokens

    def most_inner_tokens(self, merge: int = 1) -> int:
        return self.most_patches(merge) + self.leading_tokens

    def patches_of(self, tokens: float, merge: int = 1) -> float:
        share = 1.0
        if self.kept_tokens:  # then all images have one size, see `joint_faults`
            share = 1 - self.kept_tokens / self.most_tokens(merge)
        return tokens * share * self.joined(merge)

    def token_unit(self, merge: int = 1) -> int:
        if self.resize != "native":
            return self.most_inner_tokens()
        return math.gcd(merge**2, self.leading_tokens)

    @property
    def token_unit_fields(self) -> tuple[str, ...]:
        fields = ("encoder.class_token",) if self.family == "vit" else ()
        return fields + (
            ("projector.merge",) if self.resize == "native" else ("encoder.image_size", "encoder.patch_size")
        )

    def embedding_products(self) -> dict[str, int]:
        """Return {weight before the layers: its multiplications for one patch}."""
        products = {"patch_embedding.weight": self.patch_width * self.hidden_size}
        looked_up = {
            "position_embedding": self.learned_positions,
            "class_token": self.class_token,
            "register_tokens": self.register_tokens,
        }
        return products | {name: 0 for name, is_used in looked_up.items() if is_used}

    @property
    def patch_width(self) -> int:
        """Values of one patch."""
        return 3 * self.patch_frames * self.patch_size**2

    def describe_input(self, merge: int) -> tuple[str, str, str]:
        if self.resize != "native":
            pixels, side = f"{self.image_size} x {self.image_size} pixels", self.image_size // self.patch_size
            return pixels, f"{side} x {side} patches", f"{self.most_tokens(merge)}"
        return (
            f"its own ratio, {self.min_pixels} to {self.largest_area} pixels",
            f"up to {self.most_patches(merge)} patches",
            f"up to {self.most_tokens(merge)}",
        )

    def faults(self) -> list[tuple[str, str]]:
        faults = self.layer_faults()
        if faults:
            return faults
        for name in ("image_size", "position_size"):
            if getattr(self, name) % self.patch_size and (self.whole_patches or self.resize == "native"):
                faults.append(
                    ("patch_size", f"{self.patch_size} does not divide {name} {getattr(self, name)}: change one")
                )
            elif 0 < getattr(self, name) < self.patch_size:
                faults.append(("patch_size", f"{self.patch_size} is above {name} {getattr(self, name)}: lower it"))
        if self.resize not in self.resizes:
            *others, last = self.resizes
            faults.append(("resize", f"must be {', '.join(others)} or {last}, is {self.resize!r}"))
        if self.interpolation not in ("bicubic", "bilinear"):
            faults.append(("interpolation", f"must be bicubic or bilinear, is {self.interpolation!r}"))
        faults += self._bound_faults()
        for name in ("pixel_mean", "pixel_std"):
            if len(getattr(self, name)) != 3:
                faults.append((name, f"needs 3 numbers (red, green, blue), has {len(getattr(self, name))}"))
        return faults

    def _bound_faults(self) -> list[tuple[str, str]]:
        bounds = {name: getattr(self, name) for name in ("min_pixels", "max_pixels")}
        faults = []
        if self.shortest_edge and self.resize != "crop":
            text = f"is {self.shortest_edge}, and resize {self.resize} cuts nothing: set it to 0"
            faults.append(("shortest_edge", text))
        elif self.shortest_edge and self.shortest_edge < self.image_size:
            faults.append(
                (
                    "shortest_edge",
                    f"a square of image_size {self.image_size} cannot be cut out of a side of {self.shortest_edge} "
                    "pixels: raise it",
                )
            )
        if self.resize != "native":
            return faults + [
                (
                    name,
                    f"is {value}, and with resize {self.resize} every image has image_size {self.image_size}: set it "
                    "to 0",
                )
                for name, value in bounds.items()
                if value
            ]
        if self.min_pixels > self.largest_area:
            faults.append(
                (
                    "min_pixels",
                    f"{self.min_pixels} is above the largest area {self.largest_area} (max_pixels, or image_size "
                    f"{self.image_size} squared): lower it, or raise max_pixels",
                )
            )
        return faults

    def rotary_faults(self) -> list[tuple[str, str]]:
        """Return (field, message) of sizes that rotation by row and column does not support."""
        faults, heads = [], self.num_attention_heads
        if self.hidden_size % (4 * heads) and not self.hidden_size % heads:
            text = f"rotation on two axes needs heads of a multiple of 4, {self.hidden_size} / {heads} is none"
            faults.append(("num_attention_heads", f"{text}: change one of them"))
        return faults

    def num_parameters(self) -> int:
        hidden = self.hidden_size
        embeddings = self.patch_width * hidden + (hidden if self.patch_bias else 0)
        if self.learned_positions:
            embeddings += (math.prod(self.position_grid) + self.class_position) * hidden
        embeddings += self.leading_tokens * hidden
        norms = self.norm_parameters * (self.pre_norm + self.final_norm)
        return embeddings + norms + self.built_layers * self.layer_parameters

    def joint_faults(self, merge: int) -> list[tuple[str, str]]:
        unit, side = self.patch_size * merge, self.image_size // self.patch_size
        if self.keep_class_token and (merge > 1 or self.resize == "native"):
            return [
                (
                    "encoder.keep_class_token",
                    "a class token in the sequence needs images of one size and patches that are not joined, resize "
                    f"is {self.resize} and projector.merge {merge}: set it to false",
                )
            ]
        if self.resize == "native" and self.largest_area < unit**2:
            return [
                (
                    "encoder.max_pixels",
                    f"the largest area is {self.largest_area} pixels, and an image has at least {unit} x {unit} "
                    f"(patch_size {self.patch_size} x projector.merge {merge}): raise it to {unit**2}",
                )
            ]
        if self.resize != "native" and side % merge:
            return [
                (
                    "projector.merge",
                    f"{merge} does not divide the patch grid {side} x {side} "
                    f"(image_size {self.image_size} / patch_size {self.patch_size}): change one of the three",
                )
            ]
        return []


@dataclass
class VisionSpec(PatchSpec):
    """A vision transformer: patches, learned positions, pre-norm layers, a final norm."""

    normalization: str = "LayerNorm"
    """`LayerNorm` or `RMSNorm`."""
    class_token: bool = False
    """Add a learned class token inside the encoder; it is dropped before the projector."""
    final_norm: bool = True
    """Apply a norm after the layers. To export as LLaVA, set `false` (docs/pretrained.md#out)."""
