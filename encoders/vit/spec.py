"""Sizes of a vision transformer, and the arithmetic derived from them. Imports no torch."""

import math
from dataclasses import dataclass, field

from encoders.spec import layer_faults, layer_parameters


@dataclass
class VisionSpec:
    """A vision transformer: patches, learned positions, pre-norm layers, a final norm."""

    name: str = "vit"
    """Free name, shown in tables."""
    family: str = "vit"
    """Which code builds the encoder: a key of `encoders.registry.FAMILIES`."""
    resize: str = "fixed"
    """`fixed`: every picture is resized to `image_size` x `image_size`, its aspect ratio is not kept. `native`: it
    keeps its aspect ratio; sides become the nearest multiples of `patch_size * merge`, and learned positions are
    interpolated to its grid."""
    image_size: int = 224
    """Height and width, in pixels, of the grid of learned positions; with `resize: fixed`, of every picture."""
    min_pixels: int = 0
    """With `resize: native`: smaller pictures are enlarged to about this area in pixels. 0: no bound."""
    max_pixels: int = 0
    """With `resize: native`: larger pictures are reduced to at most this area in pixels. 0: `image_size` squared."""
    patch_size: int = 16
    """Height and width of one patch in pixels. Must divide `image_size`."""
    hidden_size: int = 768
    """Width of the residual stream."""
    num_layers: int = 12
    """Transformer layers."""
    num_attention_heads: int = 12
    """Attention heads. Must divide `hidden_size` and be divisible by the module's `tp`."""
    ffn_hidden_size: int = 3072
    """Width of the feed-forward block. Must be divisible by the module's `tp`."""
    normalization: str = "LayerNorm"
    """`LayerNorm` or `RMSNorm`."""
    layernorm_epsilon: float = 1e-6
    """Epsilon of every norm."""
    activation: str = "gelu"
    """`gelu`, `quick_gelu`, `relu` or `silu`."""
    class_token: bool = False
    """Whether a learned class token joins the patches inside the encoder. It is dropped before the projector."""
    dropout: float = 0.0
    """Dropout probability of hidden states and attention."""
    init_std: float = 0.02
    """Standard deviation of the initial weights."""
    pixel_mean: list[float] = field(default_factory=lambda: [0.5, 0.5, 0.5])
    """Mean per channel (red, green, blue), of pixels scaled to [0, 1]."""
    pixel_std: list[float] = field(default_factory=lambda: [0.5, 0.5, 0.5])
    """Standard deviation per channel, of pixels scaled to [0, 1]."""

    @property
    def kind(self) -> str:
        """Kind of media this encoder reads."""
        return "image"

    @property
    def medium(self) -> str:
        """What one of them is called."""
        return "picture"

    @property
    def placeholder(self) -> str:
        """Marker in a record's text at the place of a picture."""
        return "<image>"

    @property
    def sizes_vary(self) -> bool:
        """Whether media differ in their number of tokens."""
        return self.resize == "native"

    @property
    def position_grid(self) -> tuple[int, int]:
        """(rows, columns) of learned positions."""
        return self.image_size // self.patch_size, self.image_size // self.patch_size

    @property
    def largest_area(self) -> int:
        """Pixels of the largest picture that layers see."""
        return self.max_pixels or self.image_size**2

    def input_size(self, height: int, width: int, merge: int = 1) -> tuple[int, int]:
        """(height, width) in pixels that a picture of `height` x `width` is resized to.

        With resize native, sides are the nearest multiples of patch_size * merge; outside of the bounds both are scaled
        alike first. A side is at least one multiple, so that a very long picture loses some of its length.
        """
        if self.resize == "fixed":
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
        """(rows, columns) of patches of a picture of `height` x `width` pixels, before it is resized."""
        height, width = self.input_size(height, width, merge)
        return height // self.patch_size, width // self.patch_size

    def inner_tokens(self, height: int, width: int, merge: int = 1) -> int:
        """Tokens that a picture takes inside the encoder: patches, and the class token."""
        return math.prod(self.grid(height, width, merge)) + self.class_token

    def num_tokens(self, height: int, width: int, merge: int = 1) -> int:
        """Tokens that a picture takes in the sequence: patches / merge^2."""
        rows, columns = self.grid(height, width, merge)
        return (rows // merge) * (columns // merge)

    def joined(self, merge: int) -> int:
        """Patches that make one token of the sequence."""
        return merge**2

    def most_patches(self, merge: int = 1) -> int:
        """Patches of the largest picture that layers see."""
        if self.resize == "fixed":
            return math.prod(self.position_grid)
        return self.largest_area // (self.patch_size * merge) ** 2 * merge**2

    def most_tokens(self, merge: int = 1) -> int:
        """Tokens in the sequence of the largest picture."""
        return self.most_patches(merge) // merge**2

    def most_inner_tokens(self, merge: int = 1) -> int:
        """Tokens inside the encoder of the largest picture."""
        return self.most_patches(merge) + self.class_token

    def token_unit(self, merge: int = 1) -> int:
        """What divides the number of tokens that any picture has inside the encoder."""
        if self.resize == "fixed":
            return math.prod(self.position_grid) + self.class_token
        return 1 if self.class_token else merge**2

    @property
    def token_unit_fields(self) -> tuple[str, ...]:
        """Fields of the module that `token_unit` follows from."""
        own = ("encoder.class_token", "encoder.image_size", "encoder.patch_size")
        return own if self.resize == "fixed" else ("encoder.class_token", "projector.merge")

    def embedding_products(self) -> dict[str, int]:
        """Parameters in front of the layers: multiplications with each for one patch."""
        products = {"patch_embedding.weight": 3 * self.patch_size**2 * self.hidden_size, "position_embedding": 0}
        return products | ({"class_token": 0} if self.class_token else {})

    def describe_input(self, merge: int) -> tuple[str, str, str]:
        """How a picture is read, its patches and its tokens, in words."""
        if self.resize == "fixed":
            pixels = f"{self.image_size} x {self.image_size} pixels"
            return pixels, "{} x {} patches".format(*self.position_grid), f"{self.most_tokens(merge)}"
        return (
            f"its own ratio, {self.min_pixels} to {self.largest_area} pixels",
            f"up to {self.most_patches(merge)} patches",
            f"up to {self.most_tokens(merge)}",
        )

    def faults(self) -> list[tuple[str, str]]:
        """(field, sentence) of everything that cannot be built."""
        found = [
            (name, f"must be at least 1, is {getattr(self, name)}")
            for name in ("image_size", "patch_size")
            if getattr(self, name) < 1
        ]
        found += layer_faults(self)
        if found:
            return found
        if self.image_size % self.patch_size:
            found.append(
                ("patch_size", f"{self.patch_size} does not divide image_size {self.image_size}: change one of them")
            )
        if self.resize not in ("fixed", "native"):
            found.append(("resize", f"must be fixed or native, is {self.resize!r}"))
        found += self._bound_faults()
        for name in ("pixel_mean", "pixel_std"):
            if len(getattr(self, name)) != 3:
                found.append((name, f"needs 3 numbers (red, green, blue), has {len(getattr(self, name))}"))
        return found

    def _bound_faults(self) -> list[tuple[str, str]]:
        bounds = {name: getattr(self, name) for name in ("min_pixels", "max_pixels")}
        if self.resize == "fixed":
            return [
                (name, f"is {value}, and with resize fixed every picture has image_size {self.image_size}: set it to 0")
                for name, value in bounds.items()
                if value
            ]
        found = [(name, f"must be at least 0, is {value}") for name, value in bounds.items() if value < 0]
        if self.min_pixels > self.largest_area:
            found.append(
                (
                    "min_pixels",
                    f"{self.min_pixels} is above the largest area {self.largest_area} (max_pixels, or image_size "
                    f"{self.image_size} squared): lower it, or raise max_pixels",
                )
            )
        return found

    def num_parameters(self) -> int:
        """Number of trainable parameters, biases and norms included."""
        hidden = self.hidden_size
        layer, norm = layer_parameters(self)
        patch = 3 * self.patch_size**2 * hidden + hidden
        rows, columns = self.position_grid
        positions = rows * columns * hidden + (hidden if self.class_token else 0)
        return patch + positions + self.num_layers * layer + norm

    def joint_faults(self, merge: int) -> list[tuple[str, str]]:
        """(field of the module, sentence) of faults together with a projector."""
        unit = self.patch_size * merge
        if self.resize == "native" and self.largest_area < unit**2:
            return [
                (
                    "encoder.max_pixels",
                    f"the largest area is {self.largest_area} pixels, and a picture has at least {unit} x {unit} "
                    f"(patch_size {self.patch_size} x projector.merge {merge}): raise it to {unit**2}",
                )
            ]
        rows, columns = self.position_grid
        if self.resize == "fixed" and (rows % merge or columns % merge):
            return [
                (
                    "projector.merge",
                    f"{merge} does not divide the patch grid {rows} x {columns} "
                    f"(image_size {self.image_size} / patch_size {self.patch_size}): change one of the three",
                )
            ]
        return []
