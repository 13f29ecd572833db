"""The audio transformer of Qwen2-Audio in a directory of `transformers`."""

from collections.abc import Mapping
from typing import Any

from encoders.native.qwen_audio.spec import QwenAudioSpec
from encoders.native.whisper import weights as whisper
from encoders.weight_map import WeightMap

_DEFAULTS = whisper.DEFAULTS | {
    "num_mel_bins": 128,
    "d_model": 1280,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
}


def read(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> dict[str, Any]:
    """See `encoders.registry.Family.read`."""
    values = whisper.read(config, preprocessor, _DEFAULTS)
    return values | {"family": "qwen_audio", "pad_clips": False, "padded_seconds": values["max_seconds"]}


def weight_map(spec: QwenAudioSpec) -> WeightMap:
    """See `encoders.registry.Family.weight_map`."""
    return whisper.weight_map(spec).under("")
