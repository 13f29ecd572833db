"""Models of several parts in one Hugging Face directory: the config and the weights of each part."""

from mimo_train.config.pretrained.composites.base import Composite
from mimo_train.config.pretrained.composites.gemma3 import GEMMA3
from mimo_train.config.pretrained.composites.llava import LLAVA
from mimo_train.config.pretrained.composites.qwen2_audio import QWEN2_AUDIO
from mimo_train.config.pretrained.composites.qwen_vl import QWEN2_5_VL, QWEN3_VL
from mimo_train.config.pretrained.composites.tiles import LLAVA_NEXT, LLAVA_ONEVISION

COMPOSITES: dict[str, Composite] = {
    "llava": LLAVA,
    "llava_next": LLAVA_NEXT,
    "llava_onevision": LLAVA_ONEVISION,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen3_vl": QWEN3_VL,
    "qwen2_audio": QWEN2_AUDIO,
    "gemma3": GEMMA3,
    # Only their encoder is read.
    "clip": Composite("vision_config", encoder_loaded="vision_model."),
    "siglip": Composite("vision_config", encoder_loaded="vision_model."),
}
"""By `model_type` of config.json."""

UNREAD = {"llava_next_video": "joins the features of a film's images, which cannot be built"}
"""Why a model of several parts cannot be read, by `model_type`."""
