"""The vision tower of CLIP in a directory of `transformers`: its config, and its weights by name."""

import math
from collections.abc import Mapping
from typing import Any

from encoders.class_defaults import class_defaults
from encoders.native.clip.spec import ClipSpec
from encoders.native.vit.weights import LayerNames, layer_rules, norm_rules, patch_rules, unread
from encoders.pretrained import (
    CLIP_MEAN,
    CLIP_STD,
    ConfigFile,
    Published,
    image_values,
    part_of,
    preprocessor_config,
    tower_config,
    unread_norm,
)
from encoders.weight_map import WeightMap, same

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
)
"""Tensors of CLIP and SigLIP that a vision tower does not read."""

_PREPROCESSING = {
    "do_resize": True,
    "size": {"shortest_edge": 224},
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "resample": 3,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
}


def tower_values(file: ConfigFile) -> dict[str, Any]:
    """Return the size fields that CLIP and SigLIP name alike."""
    file.require(num_channels=3, attention_dropout=0.0)
    return {
        "patch_size": file.side("patch_size"),
        "hidden_size": file["hidden_size"],
        "num_layers": file["num_hidden_layers"],
        "num_attention_heads": file["num_attention_heads"],
        "ffn_hidden_size": file["intermediate_size"],
        "layernorm_epsilon": file["layer_norm_eps"],
        "activation": file.activation(),
    }


def read(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> dict[str, Any]:
    """Read CLIP or its vision tower; see `encoders.registry.Family.read`."""
    file = ConfigFile("config.json", part_of(config, "vision_config"), class_defaults("clip_vision_model"))
    images = image_values(preprocessor, _PREPROCESSING, file.side("image_size"))
    return {"family": "clip", **tower_values(file), **images}


def published(spec: ClipSpec) -> Published:
    """See `encoders.registry.Family.published`."""
    sizes = {"image_size": spec.image_size, "patch_size": spec.patch_size}
    config = tower_config(spec, **sizes, model_type="clip_vision_model", architectures=["CLIPVisionModel"])
    return Published(config, preprocessor_config(spec), unread_norm(spec, "vision_model.post_layernorm"))


def weight_map(spec: ClipSpec) -> WeightMap:
    """See `encoders.registry.Family.weight_map`."""
    hidden, positions = spec.hidden_size, math.prod(spec.position_grid) + 1
    rules = [
        *patch_rules(spec, "embeddings.patch_embedding"),
        same("position_embedding", "embeddings.position_embedding.weight", positions),
        same("class_token", "embeddings.class_embedding", hidden),
        *norm_rules("pre_norm", "pre_layrnorm", hidden),
        *layer_rules(spec, LAYERS),
    ]
    if spec.final_norm:
        rules += norm_rules("layers.final_layernorm", "post_layernorm", hidden)
    carried = (*OTHER_TENSORS, *unread(spec, LAYERS.at, "post_layernorm"))
    return WeightMap(tuple(rules), carried=carried, prefixes=("vision_model.", ""))
