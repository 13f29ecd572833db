"""Sizes of DINOv2 and DINOv3 encoders."""

from dataclasses import dataclass

from encoders.native.vit.tower import TowerSpec
from encoders.pretrained import IMAGENET_MEAN, IMAGENET_STD
from encoders.ranges import MOST_PIXELS, key


@dataclass
class Dinov2Spec(TowerSpec):
    """DINOv2 (Oquab et al. 2023, arXiv 2304.07193), with register tokens too (Darcet et al. 2023, arXiv 2309.16588):
    a class token with a position, a learned scale behind each branch of a layer. Giant is gated (`swiglu`)."""

    name: str = "dinov2"
    """Free name, shown in tables."""
    family: str = "dinov2"
    """Which code builds the encoder: a key of `encoders.registry.FAMILIES`."""
    resize: str = "crop"
    """As in family `vit`: `fixed`, `crop` or `native`."""
    image_size: int = key(224, at_least=1, at_most=MOST_PIXELS)
    """Height and width of every picture in pixels; with `resize: native` of one of average size."""
    position_size: int = key(518, at_least=1, at_most=MOST_PIXELS)
    """Height and width, in pixels, of the grid of learned positions; they are interpolated to that of a picture. 0:
    `image_size`."""
    patch_size: int = key(14, at_least=1, at_most=MOST_PIXELS)
    """Height and width of one patch in pixels. Must divide `image_size` and `position_size`."""
    register_tokens: int = key(0, at_least=0, at_most=4096)
    """Learned tokens between the class token and the patches; they are dropped behind the layers."""
    keep_class_token: bool = False
    """Whether the class token is in the sequence, in front of the patches; else it is dropped behind the layers."""
    layer_scale: float = key(1.0, above=0)
    """Initial factor of the learned scales."""
    pixel_mean: list[float] = key(factory=lambda: list(IMAGENET_MEAN), at_least=-1e6, at_most=1e6)
    """Mean per channel (red, green, blue), of pixels scaled to [0, 1]."""
    pixel_std: list[float] = key(factory=lambda: list(IMAGENET_STD), above=0, at_most=1e6)
    """Standard deviation per channel, of pixels scaled to [0, 1]."""

    class_token = True
    class_position = True
    class_token_dims = 3
    embedding_dims = 3

    @property
    def position_antialias(self) -> bool:  # type: ignore[override]
        """Whether positions of a finer grid are averaged on their way to a coarser one: in the models with register
        tokens."""
        return self.register_tokens > 0

    def faults(self) -> list[tuple[str, str]]:
        """(field, sentence) of everything that cannot be built."""
        return super().faults() + _own_faults(self)


@dataclass
class Dinov3Spec(TowerSpec):
    """DINOv3's vision transformers (Simeoni et al. 2025, arXiv 2508.10104): class token, register tokens, positions by
    rotation of queries and keys, keys without a bias, a learned scale behind each branch of a layer. The random changes
    of scale that its training gives to positions are not made. Resized pixels are not rounded."""

    name: str = "dinov3"
    """Free name, shown in tables."""
    family: str = "dinov3"
    """Which code builds the encoder: a key of `encoders.registry.FAMILIES`."""
    interpolation: str = "bilinear"
    """As in family `vit`."""
    layernorm_epsilon: float = key(1e-5, above=0, below=1)
    """Epsilon of every norm."""
    register_tokens: int = key(4, at_least=0, at_most=4096)
    """Learned tokens between the class token and the patches; they are dropped behind the layers."""
    rotary_base: float = key(100.0, above=0)
    """Base of the frequencies of positions."""
    keep_class_token: bool = False
    """Whether the class token is in the sequence, in front of the patches; else it is dropped behind the layers."""
    layer_scale: float = key(1.0, above=0)
    """Initial factor of the learned scales."""
    pixel_mean: list[float] = key(factory=lambda: list(IMAGENET_MEAN), at_least=-1e6, at_most=1e6)
    """Mean per channel (red, green, blue), of pixels scaled to [0, 1]."""
    pixel_std: list[float] = key(factory=lambda: list(IMAGENET_STD), above=0, at_most=1e6)
    """Standard deviation per channel, of pixels scaled to [0, 1]."""

    class_token = True
    class_token_dims = 3
    embedding_dims = 3
    rounded_pixels = False
    learned_positions = False
    rotary_positions = True
    key_bias = False

    def faults(self) -> list[tuple[str, str]]:
        """(field, sentence) of everything that cannot be built."""
        return super().faults() + _own_faults(self) + self.rotary_faults()


def _own_faults(spec: Dinov2Spec | Dinov3Spec) -> list[tuple[str, str]]:
    found = []
    if spec.register_tokens < 0:
        found.append(("register_tokens", f"must be at least 0, is {spec.register_tokens}"))
    if spec.layer_scale <= 0:
        found.append(("layer_scale", f"must be above 0, is {spec.layer_scale:g}"))
    return found
