"""The audio transformer of Qwen2-Audio in a directory of `transformers`."""

from collections.abc import Mapping
from typing import Any

from encoders.native.qwen_audio.spec import QwenAudioSpec
from encoders.native.whisper import weights as whisper
from encoders.weight_map import WeightMap


def read(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> dict[str, Any]:
    """See `encoders.registry.Family.read`."""
    values = whisper.read(config, preprocessor, "qwen2_audio_encoder")
    return values | {"family": "qwen_audio", "pad_clips": False, "padded_seconds": values["max_seconds"]}


def weight_map(spec: QwenAudioSpec) -> WeightMap:
    """See `encoders.registry.Family.weight_map`."""
    return whisper.weight_map(spec).under("")
