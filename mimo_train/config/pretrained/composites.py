"""Models of several parts that `transformers` saves as one directory: where each part's config is. Imports no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mimo_train.config.parts import LANGUAGE


@dataclass(frozen=True)
class Composite:
    """A vision-language or audio-language model."""

    kind: str
    """Kind of media that its encoder reads: image or audio."""
    encoder: str
    """Key of the encoder's part of config.json."""
    language: str
    """Key of the language model's part; empty: config.json itself, of models that spread it."""
    projector: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    """config.json -> keys of the projector; None: the directory has none."""

    def part(self, config: Mapping[str, Any], name: str) -> dict[str, Any]:
        """The part of config.json that is about `language` or an encoder."""
        key = self.language if name == LANGUAGE else self.encoder
        return dict(config[key]) if key in config else dict(config)


def _llava_projector(config: Mapping[str, Any]) -> dict[str, Any]:
    activations = {"gelu": "gelu", "relu": "relu", "silu": "silu", "quick_gelu": "quick_gelu"}
    activation = config.get("projector_hidden_act", "gelu")
    return {"kind": "mlp", "ffn_hidden_size": 0, "activation": activations.get(activation, activation), "merge": 1}


COMPOSITES: dict[str, Composite] = {
    "llava": Composite("image", "vision_config", "text_config", _llava_projector),
    "llava_next": Composite("image", "vision_config", "text_config"),
    "llava_onevision": Composite("image", "vision_config", "text_config"),
    "qwen2_5_vl": Composite("image", "vision_config", "text_config"),
    "qwen3_vl": Composite("image", "vision_config", "text_config"),
    "qwen2_audio": Composite("audio", "audio_config", "text_config"),
    "clip": Composite("image", "vision_config", "text_config"),
    "siglip": Composite("image", "vision_config", "text_config"),
    "whisper": Composite("audio", "", ""),
}
"""By `model_type` of config.json."""
