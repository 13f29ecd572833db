"""Qwen2.5-VL: a vision transformer at native resolution, a merger of squares of patches, a Qwen2 whose rotary positions
are of time, row and column. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from encoders.qwen_vit.weights import merger_map
from encoders.spec import joined_width
from encoders.weight_map import Spelling, WeightMap
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.pretrained.composites.base import Composite
from mimo_train.config.schema_modules import ModuleConfig

LANGUAGE_NAMES: tuple[Spelling, ...] = ("", (("model.", "model.language_model."), ("lm_head.", "lm_head.")))
"""Names as hubs have them, and as version 5 has them in memory."""


@dataclass(frozen=True)
class QwenVl(Composite):
    """A model whose config.json may have the language model's keys beside those of the whole, as hubs have it."""

    def part(self, config: Mapping[str, Any], name: str) -> dict[str, Any]:
        """See `Composite.part`. Parts need not name their family."""
        kind = config["model_type"]
        if name != LANGUAGE:
            return {**config.get(self.encoder, {}), "model_type": f"{kind}_vision"}
        inner = config.get(self.language)
        found = dict(config if inner is None else inner)
        # Where either says so, `transformers` ties.
        found["tie_word_embeddings"] = any(part.get("tie_word_embeddings", False) for part in (config, found))
        return {**found, "model_type": f"{kind}_text"}


def _projector(config: Mapping[str, Any]) -> dict[str, Any]:
    vision = config.get("vision_config", {})
    merge = vision.get("spatial_merge_size", 2)
    width = vision.get("hidden_size", 3584) * merge**2
    return {"kind": "mlp", "ffn_hidden_size": width, "activation": "gelu", "merge": merge}


def _projector_weights(module: ModuleConfig, width: int) -> WeightMap:
    return merger_map(joined_width(module.encoder, module.projector), width)


QWEN2_5_VL = QwenVl(
    "vision_config",
    "text_config",
    language_names=LANGUAGE_NAMES,
    projector=_projector,
    projector_weights=_projector_weights,
    placeholder={"pad": "<|image_pad|>", "start": "<|vision_start|>", "end": "<|vision_end|>"},
)
