"""Models of several parts that `transformers` saves as one directory: where the config and the weights of each are.
Imports no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from encoders.weight_map import Spelling, WeightMap, same, with_biases
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema_modules import ModuleConfig


@dataclass(frozen=True)
class Composite:
    """A vision-language or audio-language model."""

    encoder: str
    """Key of the encoder's part of config.json."""
    language: str = ""
    """Key of the language model's part; empty: config.json itself."""
    encoder_names: tuple[str, ...] = ("",)
    """What may be in front of the encoder's names."""
    language_names: tuple[Spelling, ...] = ()
    """How the language model's names may be spelt; empty: as alone."""
    projector: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    """config.json -> keys of the projector; None: the directory has none."""
    projector_weights: Callable[[ModuleConfig, int], WeightMap] | None = None
    """(encoder module, width of the language model) -> the projector's weights."""

    def part(self, config: Mapping[str, Any], name: str) -> dict[str, Any]:
        """The part of config.json that is about `language` or an encoder."""
        key = self.language if name == LANGUAGE else self.encoder
        return dict(config[key]) if key in config else dict(config)


_TOWER = ("vision_tower.", "model.vision_tower.")
_LANGUAGE: tuple[Spelling, ...] = (
    "language_model.",
    (("model.", "model.language_model."), ("lm_head.", "lm_head.")),
)
"""Names as hubs have them, and as version 5 has them in memory."""


def _llava_projector(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": "mlp", "ffn_hidden_size": 0, "activation": config.get("projector_hidden_act", "gelu"), "merge": 1}


def _llava_projector_weights(module: ModuleConfig, width: int) -> WeightMap:
    layers = [("encoder.linear_fc1", "linear_1"), ("encoder.linear_fc2", "linear_2")]
    rules = with_biases(same(f"{ours}.weight", f"{theirs}.weight", width) for ours, theirs in layers)
    return WeightMap(tuple(rules), prefixes=("multi_modal_projector.", "model.multi_modal_projector."))


COMPOSITES: dict[str, Composite] = {
    "llava": Composite(
        "vision_config",
        "text_config",
        encoder_names=_TOWER,
        language_names=_LANGUAGE,
        projector=_llava_projector,
        projector_weights=_llava_projector_weights,
    ),
    # Of these the encoder alone is read.
    "clip": Composite("vision_config"),
    "siglip": Composite("vision_config"),
}
"""By `model_type` of config.json."""
