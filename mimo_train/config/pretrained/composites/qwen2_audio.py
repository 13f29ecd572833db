"""Qwen2-Audio: a Whisper-like tower, one linear layer, Qwen2."""

from collections.abc import Mapping
from typing import Any

from encoders.weight_map import WeightMap, same, with_biases
from mimo_train.config.pretrained.composites.base import Composite
from mimo_train.config.pretrained.composites.llava import LANGUAGE_NAMES
from mimo_train.config.schema_modules import ModuleConfig

AUDIO_TOKEN = 151646
"""Default id of the audio token."""


def _projector(_config: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": "linear", "merge": 1}


def _pad_id(config: Mapping[str, Any]) -> int:
    return config.get("audio_token_index") or AUDIO_TOKEN


def _projector_weights(_module: ModuleConfig, width: int) -> WeightMap:
    rules = with_biases([same("encoder.weight", "linear.weight", width)])
    return WeightMap(tuple(rules), prefixes=("multi_modal_projector.", "model.multi_modal_projector."))


QWEN2_AUDIO = Composite(
    "audio_config",
    "text_config",
    encoder_names=("audio_tower.", "model.audio_tower."),
    language_names=LANGUAGE_NAMES,
    absent={"audio_config": {"model_type": "qwen2_audio_encoder"}, "text_config": {"model_type": "qwen2"}},
    pad_id=_pad_id,
    projector=_projector,
    projector_weights=_projector_weights,
)
