"""The vision towers of CLIP, SigLIP and SigLIP 2 in a directory of `transformers`: config, and weights by
name."""

from collections.abc import Mapping
from math import isqrt, prod
from typing import Any

from encoders.errors import EncoderError
from encoders.native.clip.spec import ClipSpec, Siglip2Spec, SiglipSpec
from encoders.native.vit.patch_spec import VisionSpec
from encoders.native.vit.weights import LayerNames, layer_rules, norm_rules, patch_rules, unread
from encoders.pretrained import (
    CROPPED_224,
    PIXELS,
    ConfigFile,
    Published,
    class_defaults,
    image_values,
    part_of,
    pixel_keys,
    preprocessor_config,
    tower_config,
    tower_sizes,
    unread_norm,
)
from encoders.weight_map import WeightMap, same, with_biases

LAYERS = LayerNames(
    at="encoder.layers.{}.",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    output="self_attn.out_proj",
    up=("mlp.fc1",),
    down="mlp.fc2",
    norms=("layer_norm1", "layer_norm2"),
)
"""Layer names of CLIP and SigLIP."""

OTHER_TENSORS = (
    "*embeddings.position_ids",
    "text_model.*",
    "text_projection.weight",
    "visual_projection.weight",
    "logit_scale",
    "logit_bias",
    "head.*",
)
"""Tensors of CLIP and SigLIP that a vision tower does not read."""

_SIGLIP_PREPROCESSING = PIXELS | {
    "size": {"height": 224, "width": 224},
    "resample": 3,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_POST_NORM = "vision_model.post_layernorm"


def tower_values(file: ConfigFile) -> dict[str, Any]:
    """Return the size fields that CLIP and SigLIP name alike."""
    file.require(num_channels=3, attention_dropout=0.0)
    return {
        **tower_sizes(file),
        "ffn_hidden_size": file["intermediate_size"],
        "activation": file.activation(),
    }


def read(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> dict[str, Any]:
    """Read CLIP or its vision tower; see `encoders.registry.Family.read`."""
    file = ConfigFile("config.json", part_of(config, "vision_config"), class_defaults("clip_vision_model"))
    images = image_values(preprocessor, CROPPED_224, file.side("image_size"))
    return {"family": "clip", **tower_values(file), **images}


def published(spec: ClipSpec) -> Published:
    """See `encoders.registry.Family.published`."""
    sizes = {"image_size": spec.image_size, "patch_size": spec.patch_size}
    config = tower_config(spec, **sizes, model_type="clip_vision_model", architectures=["CLIPVisionModel"])
    return Published(config, preprocessor_config(spec), unread_norm(spec, _POST_NORM))


def read_siglip(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> dict[str, Any]:
    """Read SigLIP or its vision tower; see `encoders.registry.Family.read`."""
    file = ConfigFile("config.json", part_of(config, "vision_config"), class_defaults("siglip_vision_model"))
    images = image_values(preprocessor, _SIGLIP_PREPROCESSING, file.side("image_size"))
    return {"family": "siglip", **tower_values(file), **images}


def read_siglip2(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> dict[str, Any]:
    """Read SigLIP 2 NaFlex or its vision tower; see `encoders.registry.Family.read`."""
    file = ConfigFile("config.json", part_of(config, "vision_config"), class_defaults("siglip2_vision_model"))
    side = isqrt(file["num_patches"])
    if side**2 != file["num_patches"]:
        raise EncoderError(f"config.json: num_patches is {file['num_patches']}, and only squares can be built")
    values = tower_values(file)
    defaults = _SIGLIP_PREPROCESSING | {"resample": 2, "patch_size": 16, "max_num_patches": 256}
    if not preprocessor:
        defaults["patch_size"] = values["patch_size"]
    preprocessor_file = ConfigFile(
        "preprocessor_config.json", preprocessor.get("image_processor") or preprocessor, defaults
    )
    preprocessor_file.require(patch_size=values["patch_size"])
    images = image_values({**preprocessor, "resample": preprocessor_file["resample"]}, defaults, 0, any_size=True)
    picked = {name: images[name] for name in ("interpolation", "pixel_mean", "pixel_std")}
    sizes = {"image_size": side * values["patch_size"], "max_patches": preprocessor_file["max_num_patches"]}
    return {"family": "siglip2", **values, **sizes, **picked}


def published_siglip(spec: SiglipSpec | VisionSpec) -> Published:
    """Publish `siglip`, or a `vit` that computes the same; see `encoders.registry.Family.published`."""
    if spec.class_token or spec.normalization != "LayerNorm":
        raise EncoderError("it has a class token without a position, or RMSNorm: no vision tower of transformers does")
    sizes = {"image_size": spec.image_size, "patch_size": spec.patch_size, "vision_use_head": False}
    config = tower_config(spec, **sizes, model_type="siglip_vision_model", architectures=["SiglipVisionModel"])
    return Published(config, preprocessor_config(spec), unread_norm(spec, _POST_NORM))


def published_siglip2(spec: Siglip2Spec) -> Published:
    """Publish `siglip2`; see `encoders.registry.Family.published`."""
    sizes = {"num_patches": prod(spec.position_grid), "patch_size": spec.patch_size, "vision_use_head": False}
    config = tower_config(spec, **sizes, model_type="siglip2_vision_model", architectures=["Siglip2VisionModel"])
    sizes = {"patch_size": spec.patch_size, "max_num_patches": spec.max_patches}
    return Published(config, pixel_keys(spec, "Siglip2ImageProcessorFast", **sizes), unread_norm(spec, _POST_NORM))


def weight_map(spec: ClipSpec | SiglipSpec | Siglip2Spec | VisionSpec) -> WeightMap:
    """Return the map of CLIP, SigLIP, SigLIP 2 or a `vit`; see `encoders.registry.Family.weight_map`."""
    hidden = spec.hidden_size
    # NaFlex cuts images into patches before it embeds them: its weight is that of a linear layer.
    linear = same("patch_embedding.weight", "embeddings.patch_embedding.weight", hidden)
    positions = prod(spec.position_grid) + spec.class_position
    rules = [
        *(with_biases([linear]) if spec.channels_last else patch_rules(spec, "embeddings.patch_embedding")),
        same("position_embedding", "embeddings.position_embedding.weight", positions),
        *layer_rules(spec, LAYERS),
    ]
    if spec.class_position:
        rules.append(same("class_token", "embeddings.class_embedding", hidden))
    if spec.pre_norm:
        rules += norm_rules("pre_norm", "pre_layrnorm", hidden)
    if spec.final_norm:
        rules += norm_rules("layers.final_layernorm", "post_layernorm", hidden)
    carried = (*OTHER_TENSORS, *unread(spec, LAYERS.at, "post_layernorm"))
    return WeightMap(tuple(rules), carried=carried, prefixes=("vision_model.", ""))
