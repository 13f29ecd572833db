"""Sizes of the vision tower of CLIP."""

from dataclasses import dataclass

from encoders.key_rules import key
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
