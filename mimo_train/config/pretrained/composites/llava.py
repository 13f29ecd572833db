"""LLaVA-1.5 (Liu et al. 2024, arXiv 2310.03744): a CLIP, SigLIP or DINOv2 tower, an MLP of two layers, any language
model. Imports no torch."""

from collections.abc import Mapping
from typing import Any

from encoders.errors import EncoderError
from encoders.pretrained import ConfigFile
from encoders.weight_map import Spelling, WeightMap, same, with_biases
from mimo_train.config.pretrained.composites.base import Composite
from mimo_train.config.schema_modules import ModuleConfig

TOWER_NAMES = ("vision_tower.", "model.vision_tower.")
LANGUAGE_NAMES: tuple[Spelling, ...] = (
    "language_model.",
    (("model.", "model.language_model."), ("lm_head.", "lm_head.")),
)
"""Names as hubs have them, and as version 5 has them in memory."""

_DEFAULTS = {
    "image_token_index": 32000,
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": True,
    "vision_feature_select_strategy": "default",
    "vision_feature_layer": -2,
}
_ABSENT: dict[str, dict[str, Any]] = {
    "text_config": {"model_type": "llama"},
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 336,
        "patch_size": 14,
    },
}
"""Of its class in transformers."""

_TOWERS = ("clip", "siglip", "dinov2")
"""Whose hidden states are read as they are behind a layer, without the norm that follows the last one."""


def _file(config: Mapping[str, Any]) -> ConfigFile:
    return ConfigFile("config.json", config, _DEFAULTS)


def _encoder(config: Mapping[str, Any], spec: type, tower: Mapping[str, Any]) -> dict[str, Any]:
    """What is read of the tower: a layer, with the class token or without."""
    file, family = _file(config), tower["family"]
    if family not in _TOWERS:
        raise EncoderError(
            f"config.json: the tower is of family {family}, and of a LLaVA {', '.join(_TOWERS)} are read"
        )
    if tower.get("register_tokens"):
        raise EncoderError(
            f"config.json: the tower has {tower['register_tokens']} register tokens, which LLaVA would keep in the "
            "sequence, and here they are dropped"
        )
    keys = {"feature_layer": _layer(file, tower["num_layers"]), "final_norm": False}
    strategy, has_class_token = file["vision_feature_select_strategy"], getattr(spec, "class_token", False)
    if strategy not in ("default", "full"):
        raise EncoderError(f"config.json: vision_feature_select_strategy is {strategy!r}, must be default or full")
    if has_class_token:
        keys["keep_class_token"] = strategy == "full"
    elif strategy == "default":
        raise EncoderError(
            "config.json: vision_feature_select_strategy is 'default', which drops the first token, and the tower has "
            "no class token: it would drop a patch. Only 'full' can be built"
        )
    return keys


def _layer(file: ConfigFile, layers: int) -> int:
    """The layer that is read, counted from the last, from its number or place in the list of hidden states, of which
    the first is the input of the layers."""
    given = file["vision_feature_layer"]
    numbers = given if isinstance(given, list) else [given]
    if len(numbers) != 1:
        raise EncoderError(f"config.json: vision_feature_layer is {given}, and only one layer can be read")
    layer = numbers[0] if numbers[0] < 0 else numbers[0] - layers - 1
    if not -layers <= layer <= -1:
        raise EncoderError(f"config.json: vision_feature_layer is {given}, and the tower has {layers} layers")
    return layer


def _projector(config: Mapping[str, Any]) -> dict[str, Any]:
    file = _file(config)
    file.require(multimodal_projector_bias=True)
    return {"kind": "mlp", "ffn_hidden_size": 0, "activation": file.activation("projector_hidden_act"), "merge": 1}


def _projector_weights(module: ModuleConfig, width: int) -> WeightMap:
    layers = [("encoder.linear_fc1", "linear_1"), ("encoder.linear_fc2", "linear_2")]
    rules = with_biases(same(f"{ours}.weight", f"{theirs}.weight", width) for ours, theirs in layers)
    return WeightMap(tuple(rules), prefixes=("multi_modal_projector.", "model.multi_modal_projector."))


def _pad_id(config: Mapping[str, Any]) -> int:
    return config.get("image_token_id") or _file(config)["image_token_index"]


def _processor(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of these the processor counts a picture's tokens; without `patch_size` it fails."""
    tower = LLAVA.part(config, "")
    patch, class_token = _PATCHES.get(tower["model_type"], (None, 0))
    return {
        "processor_class": "LlavaProcessor",
        "patch_size": tower.get("patch_size") or patch,
        "num_additional_image_tokens": class_token,
        "vision_feature_select_strategy": _file(config)["vision_feature_select_strategy"],
    }


_PATCHES = {"clip_vision_model": (32, 1), "siglip_vision_model": (16, 0), "dinov2": (14, 1)}
"""Side of a patch where a tower's config does not say it, and class tokens, by `model_type`."""

LLAVA = Composite(
    "vision_config",
    "text_config",
    encoder_names=TOWER_NAMES,
    language_names=LANGUAGE_NAMES,
    absent=_ABSENT,
    encoder_keys=_encoder,
    pad_id=_pad_id,
    processor=_processor,
    projector=_projector,
    projector_weights=_projector_weights,
)
