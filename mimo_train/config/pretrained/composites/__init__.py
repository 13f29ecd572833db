"""Models of several parts that `transformers` saves as one directory: where the config and the weights of each are.
Imports no torch."""

from mimo_train.config.pretrained.composites.base import Composite
from mimo_train.config.pretrained.composites.llava import LLAVA
from mimo_train.config.pretrained.composites.qwen2_audio import QWEN2_AUDIO
from mimo_train.config.pretrained.composites.qwen_vl import QWEN2_5_VL, QWEN3_VL

COMPOSITES: dict[str, Composite] = {
    "llava": LLAVA,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen3_vl": QWEN3_VL,
    "qwen2_audio": QWEN2_AUDIO,
    # Of these the encoder alone is read.
    "clip": Composite("vision_config"),
    "siglip": Composite("vision_config"),
}
"""By `model_type` of config.json."""

_TILES = "cuts pictures into tiles, whose features it joins with a learned row behind every line: this cannot be built"
UNREAD = dict.fromkeys(("llava_next", "llava_next_video", "llava_onevision"), _TILES)
"""Why a model of several parts cannot be read, by `model_type`."""
