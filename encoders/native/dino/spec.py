"""Sizes of DINOv2 and DINOv3 encoders."""

from dataclasses import dataclass

from encoders.key_rules import MOST_PIXELS, key
from encoders.native.vit.tower import TowerSpec
from encoders.pretrained import IMAGENET_MEAN, IMAGENET_STD


@dataclass
class Dinov2Spec(TowerSpec):
    """DINOv2 (Oquab et al. 2023, arXiv 2304.07193), also with register tokens (Darcet et al. 2023, arXiv 2309.16588).
    For the giant model set `activation: swiglu`."""

    name: str = "dinov2"
    family: str = "dinov2"
    resize: str = "crop"
    image_size: int = key(224, at_least=1, at_most=MOST_PIXELS)
    """Side of every image in pixels; with `resize: native`, of an average one."""
    position_size: int = key(518, at_least=1, at_most=MOST_PIXELS)
    """Side in pixels of the grid of learned positions."""
    patch_size: int = key(14, at_least=1, at_most=MOST_PIXELS)
    """Side of a patch in pixels. Must divide `image_size` and `position_size`."""
    register_tokens: int = key(0, at_least=0, at_most=4096)
    """Learned tokens after the class token. They give no features."""
    keep_class_token: bool = False
    """Keep the class token in the sequence, before the patches."""
    layer_scale: float = key(1.0, above=0)
    """Initial factor of the learned scale of each branch."""
    pixel_mean: list[float] = key(factory=lambda: list(IMAGENET_MEAN), at_least=-1e6, at_most=1e6)
    pixel_std: list[float] = key(factory=lambda: list(IMAGENET_STD), above=0, at_most=1e6)

    class_token = True
    class_position = True
    class_token_dims = 3
    embedding_dims = 3

    @property
    def position_antialias(self) -> bool:  # type: ignore[override]
        """True if interpolation to a coarser grid averages positions: in the models with register tokens."""
        return self.register_tokens > 0


@dataclass
class Dinov3Spec(TowerSpec):
    """DINOv3's vision transformers (Simeoni et al. 2025, arXiv 2508.10104), with rotary positions. The random position
    scaling of its training is not applied. Resized pixels are not rounded."""

    name: str = "dinov3"
    family: str = "dinov3"
    interpolation: str = "bilinear"
    layernorm_epsilon: float = key(1e-5, above=0, below=1)
    register_tokens: int = key(4, at_least=0, at_most=4096)
    """Learned tokens after the class token. They give no features."""
    rotary_base: float = key(100.0, above=0)
    """Base of the rotary frequencies."""
    keep_class_token: bool = False
    """Keep the class token in the sequence, before the patches."""
    layer_scale: float = key(1.0, above=0)
    """Initial factor of the learned scale of each branch."""
    pixel_mean: list[float] = key(factory=lambda: list(IMAGENET_MEAN), at_least=-1e6, at_most=1e6)
    pixel_std: list[float] = key(factory=lambda: list(IMAGENET_STD), above=0, at_most=1e6)

    class_token = True
    class_token_dims = 3
    embedding_dims = 3
    rounded_pixels = False
    learned_positions = False
    rotary_positions = True
    key_bias = False

    def faults(self) -> list[tuple[str, str]]:
        return super().faults() + self.rotary_faults()
