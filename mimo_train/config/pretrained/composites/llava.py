"""LLaVA-1.5 (Liu et al. 2024, arXiv 2310.03744): a CLIP, SigLIP or DINOv2 tower, a two-layer MLP, a language model."""

from collections.abc import Mapping
from typing import Any

from data.text_format import plural
from encoders.errors import EncoderError
from encoders.pretrained import ConfigFile
from encoders.weight_map import Rule, Spelling, WeightMap, same, with_biases
from mimo_train.config.pretrained.composites.base import Composite
from mimo_train.config.schema_modules import ModuleConfig

TOWER_NAMES = ("vision_tower.", "model.vision_tower.")
LANGUAGE_NAMES: tuple[Spelling, ...] = (
    "language_model.",
    (("model.", "model.language_model."), ("lm_head.", "lm_head.")),
)
"""Names in files of the hub, and names of version 5 in memory."""

_DEFAULTS: dict[str, Any] = {
    "image_token_index": 32000,
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": True,
    "vision_feature_select_strategy": "default",
    "vision_feature_layer": -2,
}
ABSENT: dict[str, dict[str, Any]] = {
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
"""Defaults of its class in transformers."""

_TOWERS = ("clip", "siglip", "dinov2")
"""Towers whose hidden states are read directly after a layer, without the norm that follows the last one."""


_OF_KIND: dict[str, dict[str, Any]] = {
    "llava_onevision": {
        "image_token_index": 151646,
        "vision_feature_select_strategy": "full",
        "vision_feature_layer": -1,
    },
}
"""Defaults that differ from `_DEFAULTS`, by `model_type`."""


def llava_file(config: Mapping[str, Any]) -> ConfigFile:
    """Return config.json of any kind of LLaVA, with the defaults of its class."""
    return ConfigFile("config.json", config, _DEFAULTS | _OF_KIND.get(config.get("model_type", ""), {}))


def tower_keys(config: Mapping[str, Any], spec: type, tower: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the tower's features: a layer, with or without the class token. Raises EncoderError."""
    file, family = llava_file(config), tower["family"]
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
    """Return the feature layer, counted from the last one. config.json has its index in the list of hidden states,
    whose first entry is the input of the layers."""
    feature_layer = file["vision_feature_layer"]
    numbers = feature_layer if isinstance(feature_layer, list) else [feature_layer]
    if len(numbers) != 1:
        raise EncoderError(f"config.json: vision_feature_layer is {feature_layer}, and only one layer can be read")
    layer = numbers[0] if numbers[0] < 0 else numbers[0] - layers - 1
    if not -layers <= layer <= -1:
        raise EncoderError(
            f"config.json: vision_feature_layer is {feature_layer}, and the tower has {plural(layers, 'layer')}"
        )
    return layer


def projector_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a two-layer MLP."""
    file = llava_file(config)
    keys = {"kind": "mlp", "ffn_hidden_size": 0, "activation": file.activation("projector_hidden_act"), "merge": 1}
    return keys | {"bias": bool(file["multimodal_projector_bias"])}


def projector_rules(width: int, bias: bool, before: str = "") -> tuple[Rule, ...]:
    """Return the weights of a two-layer MLP for a language model of `width`; `before`: prefix of their names."""
    layers = [("encoder.linear_fc1", "linear_1"), ("encoder.linear_fc2", "linear_2")]
    rules = [same(f"{ours}.weight", f"{before}{theirs}.weight", width) for ours, theirs in layers]
    return tuple(with_biases(rules) if bias else rules)


def _projector_weights(module: ModuleConfig, width: int) -> WeightMap:
    return WeightMap(
        projector_rules(width, module.projector.bias),
        prefixes=("multi_modal_projector.", "model.multi_modal_projector."),
    )


def pad_id(config: Mapping[str, Any]) -> int:
    """Return the id of the image token."""
    return config.get("image_token_id") or llava_file(config)["image_token_index"]


def _processor(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"processor_class": "LlavaProcessor", **counting_keys(config, LLAVA.part(config, ""))}


def counting_keys(config: Mapping[str, Any], tower: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys by which the processor counts an image's tokens; without `patch_size` it fails. `tower`: the
    vision tower's part of config.json."""
    patch, class_token = _PATCHES.get(tower["model_type"], (None, 0))
    return {
        "patch_size": tower.get("patch_size") or patch,
        "num_additional_image_tokens": class_token,
        "vision_feature_select_strategy": llava_file(config)["vision_feature_select_strategy"],
    }


_PATCHES = {"clip_vision_model": (32, 1), "siglip_vision_model": (16, 0), "dinov2": (14, 1)}
"""Default patch size and number of class tokens of a tower, by `model_type`."""

LLAVA = Composite(
    "vision_config",
    "text_config",
    encoder_names=TOWER_NAMES,
    language_names=LANGUAGE_NAMES,
    absent=ABSENT,
    encoder_keys=tower_keys,
    pad_id=pad_id,
    processor=_processor,
    projector=projector_keys,
    projector_weights=_projector_weights,
)
