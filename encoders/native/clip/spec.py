"""Sizes of the vision tower of CLIP."""

from dataclasses import dataclass

from encoders.native.vit.tower import TowerSpec
from encoders.pretrained import CLIP_MEAN, CLIP_STD
from encoders.ranges import key


@dataclass
class ClipSpec(TowerSpec):
    """The vision tower of CLIP (Radford et al. 2021, arXiv 2103.00020): a class token with a position of its own, a
    norm in front of the layers, patches without a bias. What LLaVA-1.5 reads is `feature_layer: -2`."""

    name: str = "clip"
    """Free name, shown in tables."""
    family: str = "clip"
    """Which code builds the encoder: a key of `encoders.registry.FAMILIES`."""
    resize: str = "crop"
    """As in family `vit`: `fixed`, `crop` or `native`."""
    layernorm_epsilon: float = key(1e-5, above=0, below=1)
    """Epsilon of every norm."""
    activation: str = "quick_gelu"
    """As in family `vit`; `quick_gelu` in OpenAI's models, `gelu` in most of LAION's."""
    keep_class_token: bool = False
    """Whether the class token is in the sequence, in front of the patches; else it is dropped behind the layers."""
    final_norm: bool = False
    """Whether the norm that the tower has behind its last layer is applied to what is read. CLIP itself applies it to
    the class token alone."""
    pixel_mean: list[float] = key(factory=lambda: list(CLIP_MEAN), at_least=-1e6, at_most=1e6)
    """Mean per channel (red, green, blue), of pixels scaled to [0, 1]."""
    pixel_std: list[float] = key(factory=lambda: list(CLIP_STD), above=0, at_most=1e6)
    """Standard deviation per channel, of pixels scaled to [0, 1]."""

    pre_norm = True
    patch_bias = False
    class_token = True
    class_token_dims = 1
    class_position = True
