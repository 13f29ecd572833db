"""Sizes of a vision transformer. Imports no torch."""

from dataclasses import dataclass

from encoders.native.vit.picture import PictureSpec


@dataclass
class VisionSpec(PictureSpec):
    """A vision transformer: patches, learned positions, pre-norm layers, a final norm."""

    normalization: str = "LayerNorm"
    """`LayerNorm` or `RMSNorm`."""
    class_token: bool = False
    """Whether a learned class token joins the patches inside the encoder. It is dropped before the projector."""
    final_norm: bool = True
    """Whether a norm follows the layers. LLaVA reads towers without one: a model that should leave as LLaVA needs
    `false` (docs/pretrained.md#out)."""
