"""Gemma 3 with images (Gemma Team 2025, arXiv 2503.19786); only its language model is read."""

from mimo_train.config.pretrained.composites.base import Composite
from mimo_train.config.pretrained.composites.llava import LANGUAGE_NAMES

GEMMA3 = Composite(
    "vision_config",
    "text_config",
    language_names=LANGUAGE_NAMES,
    absent={"text_config": {"model_type": "gemma3_text"}},
    no_encoder="lets the tokens of an image see each other, where attention here is causal",
)
