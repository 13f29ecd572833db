"""LLaVA-NeXT (Liu et al. 2024) and LLaVA-OneVision (Li et al. 2024, arXiv 2408.03326): LLaVA with tiled images
(`encoders.native.vit.tiles`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from encoders.errors import EncoderError
from encoders.pretrained import CLIP_MEAN, CLIP_STD, ConfigFile
from encoders.weight_map import WeightMap, same
from mimo_train.config.pretrained.composites.base import Composite
from mimo_train.config.pretrained.composites.llava import (
    ABSENT,
    LANGUAGE_NAMES,
    TOWER_NAMES,
    counting_keys,
    llava_file,
    pad_id,
    projector_keys,
    projector_rules,
    tower_keys,
)
from mimo_train.config.schema_modules import ModuleConfig


@dataclass(frozen=True)
class _Kind:
    """Differences between LLaVA-NeXT and LLaVA-OneVision."""

    pinpoints: list[list[int]]
    """Canvases where config.json names none."""
    size: dict[str, Any]
    """Keys of its image processor's class."""
    tower: Mapping[str, Any]
    language: str
    pools: bool = False
    """True if features are averaged (`vision_aspect_ratio`), and samples with several images have uncut ones."""


_SIDES = range(384, 2305, 384)
_KINDS = {
    "llava_next": _Kind(
        [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
        {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}, "do_center_crop": True},
        ABSENT["vision_config"],
        "llama",
    ),
    "llava_onevision": _Kind(
        [list(sides) for sides in product(_SIDES, _SIDES)],
        {"size": {"height": 384, "width": 384}, "crop_size": None, "do_center_crop": None},
        {
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 26,
            "num_attention_heads": 16,
            "image_size": 384,
            "patch_size": 14,
            "vision_use_head": False,
        },
        "qwen2",
        pools=True,
    ),
}
_PIXELS = {
    "do_resize": True,
    "resample": 3,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
}
"""Defaults of both image processor classes."""
_POOLED = "anyres_max_"


def _pinpoints(config: Mapping[str, Any]) -> list[list[int]]:
    pinpoints = config.get("image_grid_pinpoints") or _KINDS[config["model_type"]].pinpoints
    return [list(size) for size in pinpoints]


def _preprocessor(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the preprocessor of a tile; `_encoder` sets the rest. Raises EncoderError if it contradicts
    config.json."""
    image_processor = preprocessor.get("image_processor") or preprocessor
    if not image_processor:
        return {}
    kind = _KINDS[config["model_type"]]
    file = ConfigFile("preprocessor_config.json", image_processor, kind.size | _PIXELS)
    pinpoints = [list(size) for size in file.get("image_grid_pinpoints") or kind.pinpoints]
    if pinpoints != _pinpoints(config):
        raise EncoderError(
            f"image_grid_pinpoints are {pinpoints} in preprocessor_config.json, and {_pinpoints(config)} in "
            "config.json: the model would count other tokens than the processor"
        )
    size, crop = file["size"], file["crop_size"]
    sides = {size} if isinstance(size, int) else set(size.values())
    if file["do_center_crop"]:
        sides |= {crop} if isinstance(crop, int) else set((crop or {}).values())
    if len(sides) != 1:
        raise EncoderError(
            f"{file.name}: size is {size} and crop_size {crop}, and only tiles that are equal squares can be built"
        )
    (side,) = sides
    pixels = {key: file[key] for key in _PIXELS}
    return {"size": {"height": side, "width": side}, "do_center_crop": False, **pixels}


def _encoder(config: Mapping[str, Any], spec: type, tower: Mapping[str, Any]) -> dict[str, Any]:
    keys, file, kind = tower_keys(config, spec, tower), llava_file(config), _KINDS[config["model_type"]]
    if keys.get("keep_class_token"):
        raise EncoderError(
            "config.json: vision_feature_select_strategy is 'full', which keeps the class token, and features of tiles "
            "are put in lines: only 'default' can be built"
        )
    if file.get("use_image_newline_parameter") is False:
        raise EncoderError("config.json: use_image_newline_parameter is False, and only True can be built")
    keys |= {"resize": "tiles", "grid_pinpoints": _pinpoints(config), "cut_several": not kind.pools}
    if kind.pools:
        ratio = str(file.get("vision_aspect_ratio") or f"{_POOLED}9")
        most = ratio.removeprefix(_POOLED)
        if not ratio.startswith(_POOLED) or not most.isdecimal() or not int(most):
            raise EncoderError(f"config.json: vision_aspect_ratio is {ratio!r}, and only {_POOLED}N can be built")
        keys["max_tiles"] = int(most)
    return keys


def _projector(config: Mapping[str, Any]) -> dict[str, Any]:
    return projector_keys(config) | {"newline": True}


def _projector_weights(module: ModuleConfig, width: int) -> WeightMap:
    rules = (
        *projector_rules(width, module.projector.bias, "multi_modal_projector."),
        same("newline", "image_newline", width),
    )
    return WeightMap(rules, prefixes=("", "model."))


def _processor(composite: str, config: Mapping[str, Any]) -> dict[str, Any]:
    counting = counting_keys(config, _composite(composite).part(config, ""))
    if composite == "llava_next":
        return {"processor_class": "LlavaNextProcessor", **counting}
    tower = {**_KINDS[composite].tower, **(config.get("vision_config") or {})}
    return {
        "processor_class": "LlavaOnevisionProcessor",
        "num_image_tokens": (tower["image_size"] // tower["patch_size"]) ** 2,
        "vision_feature_select_strategy": counting["vision_feature_select_strategy"],
        "vision_aspect_ratio": config.get("vision_aspect_ratio") or f"{_POOLED}9",
    }


def _composite(kind: str) -> Composite:
    entry = _KINDS[kind]
    return Composite(
        "vision_config",
        "text_config",
        encoder_names=TOWER_NAMES,
        language_names=LANGUAGE_NAMES,
        absent={"vision_config": entry.tower, "text_config": {"model_type": entry.language}},
        encoder_keys=_encoder,
        preprocessor=_preprocessor,
        pad_id=pad_id,
        processor=partial(_processor, kind),
        projector=_projector,
        projector_weights=_projector_weights,
    )


LLAVA_NEXT, LLAVA_ONEVISION = (_composite(kind) for kind in _KINDS)
