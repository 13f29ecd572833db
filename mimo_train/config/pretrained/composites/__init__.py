"""Models of several parts in one Hugging Face directory: the config and the weights of each part."""

from encoders.errors import EncoderError
from encoders.registry import FAMILIES
from mimo_train.config.errors import ConfigError, Fault
from mimo_train.config.pretrained.composites.base import Composite
from mimo_train.config.pretrained.composites.llava import LLAVA
from mimo_train.config.pretrained.composites.of_transformers import of_transformers
from mimo_train.config.pretrained.composites.qwen2_audio import QWEN2_AUDIO
from mimo_train.config.pretrained.composites.qwen_vl import QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE
from mimo_train.config.pretrained.composites.tiles import LLAVA_NEXT, LLAVA_ONEVISION
from mimo_train.config.pretrained.directory import Directory

ENCODERS = {kind for family in FAMILIES.values() for kind in family.readers}
"""Model types of single encoders."""

ALONE = ("clip", "siglip")
"""Model types with an image encoder and a text encoder, which is not read."""

COMPOSITES: dict[str, Composite] = {
    "llava": LLAVA,
    "llava_next": LLAVA_NEXT,
    "llava_onevision": LLAVA_ONEVISION,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": QWEN3_VL_MOE,
    "qwen2_audio": QWEN2_AUDIO,
    **dict.fromkeys(ALONE, Composite("vision_config", encoder_loaded="vision_model.")),
}
"""By `model_type` of config.json."""

_PARTS = {"text_config", "vision_config", "audio_config", "llm_config", "thinker_config"}
"""Keys of config.json that identify a model of several parts."""


def composite_of(directory: Directory) -> Composite | None:
    """Return how a model of several parts is read; None for a model of one. Raise ConfigError if transformers cannot
    build it."""
    if "mm_vision_tower" in directory.config:
        text = (
            f"{directory.folder} is a LLaVA in the format of its own repository (mm_vision_tower), not of "
            "transformers: use its published conversion (llava-hf in the hub), or convert it"
        )
        raise ConfigError([Fault(directory.key, text)])
    kind = directory.model_type
    if kind in COMPOSITES or kind in ENCODERS or not _PARTS & directory.config.keys():
        return COMPOSITES.get(kind)
    try:
        return of_transformers(directory.folder)
    except EncoderError as error:
        raise ConfigError([Fault(directory.key, f"{directory.folder}: {error}")]) from error
