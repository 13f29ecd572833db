"""LLaVA: a CLIP or SigLIP tower, an MLP of two layers, any language model. Imports no torch."""

from collections.abc import Mapping
from typing import Any

from encoders.weight_map import Spelling, WeightMap, same, with_biases
from mimo_train.config.pretrained.composites.base import Composite
from mimo_train.config.schema_modules import ModuleConfig

TOWER_NAMES = ("vision_tower.", "model.vision_tower.")
LANGUAGE_NAMES: tuple[Spelling, ...] = (
    "language_model.",
    (("model.", "model.language_model."), ("lm_head.", "lm_head.")),
)
"""Names as hubs have them, and as version 5 has them in memory."""


def _projector(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": "mlp", "ffn_hidden_size": 0, "activation": config.get("projector_hidden_act", "gelu"), "merge": 1}


def _projector_weights(module: ModuleConfig, width: int) -> WeightMap:
    layers = [("encoder.linear_fc1", "linear_1"), ("encoder.linear_fc2", "linear_2")]
    rules = with_biases(same(f"{ours}.weight", f"{theirs}.weight", width) for ours, theirs in layers)
    return WeightMap(tuple(rules), prefixes=("multi_modal_projector.", "model.multi_modal_projector."))


LLAVA = Composite(
    "vision_config",
    "text_config",
    encoder_names=TOWER_NAMES,
    language_names=LANGUAGE_NAMES,
    projector=_projector,
    projector_weights=_projector_weights,
)
