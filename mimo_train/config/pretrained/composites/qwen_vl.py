"""Qwen2.5-VL and Qwen3-VL, also with experts: a vision transformer at native resolution, a merger of patch squares, and
a Qwen with rotary positions of time, row and column."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from encoders.native.qwen_vit import weights as qwen_vit
from encoders.weight_map import Spelling, WeightMap
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.pretrained.composites.base import Composite
from mimo_train.config.schema_modules import ModuleConfig

_NESTED: Spelling = (("model.", "model.language_model."), ("lm_head.", "lm_head."))
"""Names of the language model: in files of the hub for Qwen3-VL, in memory of version 5 for Qwen2.5-VL too."""


@dataclass(frozen=True)
class QwenVl(Composite):
    """A model whose config.json may have the language model's keys at the top level, as on the hub."""

    ties_inside: bool = True
    """True if the language model's part can tie the embeddings too."""

    def part(self, config: Mapping[str, Any], name: str) -> dict[str, Any]:
        """See `Composite.part`. Parts need not name their family."""
        kind = config["model_type"]
        if name != LANGUAGE:
            return {**config.get(self.encoder, {}), "model_type": f"{kind}_vision"}
        inner = config.get(self.language)
        keys = {key: value for key, value in config.items() if key != self.encoder} if inner is None else dict(inner)
        # `transformers` ties the embeddings if either sets it.
        parts = (config, keys) if self.ties_inside else (config,)
        keys["tie_word_embeddings"] = any(part.get("tie_word_embeddings", False) for part in parts)
        return {**keys, "model_type": f"{kind}_text"}


def _projector(width: int) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return a function for the projector's keys; `width` is the encoder's default."""

    def keys(config: Mapping[str, Any]) -> dict[str, Any]:
        vision = config.get("vision_config", {})
        merge = vision.get("spatial_merge_size", 2)
        merged = vision.get("hidden_size", width) * merge**2
        return {"kind": "mlp", "ffn_hidden_size": merged, "activation": "gelu", "merge": merge}

    return keys


def _projector_weights(merger_map: Callable[[int, int], WeightMap]) -> Callable[[ModuleConfig, int], WeightMap]:
    def weights(module: ModuleConfig, width: int) -> WeightMap:
        return merger_map(module.encoder.joined_width(module.projector.merge), width)

    return weights


def video_keys(folder: Path, pad: int, has_tokenizer: bool) -> dict[str, Any]:
    """Return the keys of an encoder that reads videos by the processor of its directory. Without one that reads them
    they are images."""
    from encoders.transformers_media.videos import reads_videos

    if not has_tokenizer or not reads_videos(str(folder), pad):
        return {}
    return {"path": str(folder), "pad": pad, "reads_videos": True}


def _pad_id(config: Mapping[str, Any]) -> int:
    return config.get("image_token_id", 151655)


_PLACEHOLDER = {"pad": "<|image_pad|>", "start": "<|vision_start|>", "end": "<|vision_end|>"}

QWEN2_5_VL = QwenVl(
    "vision_config",
    "text_config",
    language_names=("", _NESTED),
    projector=_projector(3584),
    projector_weights=_projector_weights(qwen_vit.merger_map),
    encoder_loaded="model.visual.",
    placeholder=_PLACEHOLDER,
    pad_id=_pad_id,
)
QWEN3_VL = QwenVl(
    "vision_config",
    "text_config",
    language_names=(_NESTED,),
    projector=_projector(1152),
    projector_weights=_projector_weights(qwen_vit.merger_map_qwen3),
    encoder_loaded="model.visual.",
    placeholder=_PLACEHOLDER,
    pad_id=_pad_id,
)
QWEN3_VL_MOE = replace(QWEN3_VL, ties_inside=False)
