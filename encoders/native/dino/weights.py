"""DINOv2 and DINOv3 in a directory of `transformers`: config, and weights by name."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from encoders.base import GATED
from encoders.errors import EncoderError
from encoders.native.dino.spec import Dinov2Spec, Dinov3Spec
from encoders.native.vit.weights import LayerNames, layer_rules, norm_rules, patch_rules, unread
from encoders.pretrained import (
    CROPPED_224,
    IMAGENET_MEAN,
    IMAGENET_STD,
    PIXELS,
    ConfigFile,
    Published,
    class_defaults,
    image_values,
    preprocessor_config,
    tower_config,
    tower_sizes,
    unread_norm,
)
from encoders.weight_map import WeightMap, same

_PREPROCESSING_3 = PIXELS | {
    "size": {"height": 224, "width": 224},
    "resample": 2,
    "image_mean": IMAGENET_MEAN,
    "image_std": IMAGENET_STD,
}

_LAYERS = LayerNames(
    at="encoder.layer.{}.",
    query="attention.attention.query",
    key="attention.attention.key",
    value="attention.attention.value",
    output="attention.output.dense",
    up=("mlp.fc1",),
    down="mlp.fc2",
    norms=("norm1", "norm2"),
    scales=("layer_scale1.lambda1", "layer_scale2.lambda1"),
)
_LAYERS_3 = LayerNames(
    at="layer.{}.",
    query="attention.q_proj",
    key="attention.k_proj",
    value="attention.v_proj",
    output="attention.o_proj",
    up=("mlp.up_proj",),
    down="mlp.down_proj",
    norms=("norm1", "norm2"),
    scales=_LAYERS.scales,
    key_bias=False,
)


def read(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> dict[str, Any]:
    """Read DINOv2, with or without register tokens; see `encoders.registry.Family.read`."""
    with_registers = config["model_type"] == "dinov2_with_registers"
    file = ConfigFile("config.json", config, class_defaults(config["model_type"]))
    file.require(num_channels=3, qkv_bias=True, drop_path_rate=0.0)
    file.require(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    activation = GATED if file["use_swiglu_ffn"] else file.activation()
    side = file.side("image_size")
    images = image_values(preprocessor, CROPPED_224, side, any_size=True)
    return {
        "family": "dinov2",
        "ffn_hidden_size": _ffn_size(file["hidden_size"], file["mlp_ratio"], activation),
        "activation": activation,
        "position_size": side // file.side("patch_size") * file.side("patch_size"),
        "register_tokens": file["num_register_tokens"] if with_registers else 0,
        "layer_scale": float(file["layerscale_value"]),
        **tower_sizes(file),
        **images,
    }


def read_3(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> dict[str, Any]:
    """Read DINOv3's vision transformers; see `encoders.registry.Family.read`."""
    file = ConfigFile("config.json", config, class_defaults("dinov3_vit"))
    file.require(num_channels=3, attention_dropout=0.0, drop_path_rate=0.0)
    file.require(query_bias=True, key_bias=False, value_bias=True, proj_bias=True, mlp_bias=True)
    activation = file.activation()
    if file["use_gated_mlp"]:
        if activation != "silu":
            raise EncoderError(f"config.json: hidden_act is {activation!r} with use_gated_mlp, only silu can be built")
        activation = GATED
    images = image_values(preprocessor, _PREPROCESSING_3, file.side("image_size"), any_size=True)
    return {
        "family": "dinov3",
        "ffn_hidden_size": file["intermediate_size"],
        "activation": activation,
        "rotary_base": file["rope_theta"],
        "register_tokens": file["num_register_tokens"],
        "layer_scale": float(file["layerscale_value"]),
        **tower_sizes(file),
        **images,
    }


def _ffn_size(hidden: int, ratio: float, activation: str) -> int:
    """Return the width of DINOv2's feed-forward block. A gated one has two thirds of it, rounded up to a multiple of
    8."""
    ffn = int(hidden * ratio)
    return -(-int(ffn * 2 / 3) // 8) * 8 if activation == GATED else ffn


def published(spec: Dinov2Spec) -> Published:
    """Publish DINOv2; see `encoders.registry.Family.published`."""
    hidden, registers = spec.hidden_size, spec.register_tokens
    widths = {_ffn_size(hidden, ratio, spec.activation): ratio for ratio in range(64, 0, -1)}
    if spec.ffn_hidden_size not in widths:
        near = min(widths, key=lambda width: abs(width - spec.ffn_hidden_size))
        raise EncoderError(
            f"ffn_hidden_size is {spec.ffn_hidden_size}, and Dinov2Model has whole multiples of hidden_size {hidden} "
            f"only (mlp_ratio): set ffn_hidden_size={near}"
        )
    kind, name = ("dinov2_with_registers", "Dinov2WithRegisters") if registers else ("dinov2", "Dinov2")
    config = _config(
        spec,
        model_type=kind,
        architectures=[f"{name}Model"],
        image_size=spec.position_size or spec.image_size,
        mlp_ratio=widths[spec.ffn_hidden_size],
        use_swiglu_ffn=spec.activation == GATED,
    )
    mask = {"embeddings.mask_token": ((1, hidden), 0.0)}
    return Published(config, preprocessor_config(spec), mask | unread_norm(spec, "layernorm"))


def published_3(spec: Dinov3Spec) -> Published:
    """Publish DINOv3; see `encoders.registry.Family.published`."""
    config = _config(
        spec,
        model_type="dinov3_vit",
        architectures=["DINOv3ViTModel"],
        image_size=spec.image_size,
        rope_theta=spec.rotary_base,
        use_gated_mlp=spec.activation == GATED,
    )
    unread = {"embeddings.mask_token": ((1, 1, spec.hidden_size), 0.0), **unread_norm(spec, "norm")}
    if not spec.register_tokens:
        unread["embeddings.register_tokens"] = ((1, 0, spec.hidden_size), 0.0)
    return Published(config, preprocessor_config(spec), unread)


def _config(spec: Dinov2Spec | Dinov3Spec, **keys: Any) -> dict[str, Any]:
    """Return config.json. The gate of a gated block is always SiLU."""
    named = replace(spec, activation="silu") if spec.activation == GATED else spec
    sizes = {"patch_size": spec.patch_size, "layerscale_value": spec.layer_scale}
    return tower_config(named, **sizes, num_register_tokens=spec.register_tokens, **keys)


def weight_map(spec: Dinov2Spec) -> WeightMap:
    """Return DINOv2's map; see `encoders.registry.Family.weight_map`."""
    hidden, names = spec.hidden_size, _LAYERS
    if spec.activation == GATED:
        names = replace(names, up=("mlp.weights_in",) * 2, down="mlp.weights_out")
    rules = [
        *patch_rules(spec, "embeddings.patch_embeddings.projection"),
        same("position_embedding", "embeddings.position_embeddings", 1, tail=(prod(spec.position_grid) + 1, hidden)),
        same("class_token", "embeddings.cls_token", 1, tail=(1, hidden)),
    ]
    if spec.register_tokens:
        rules.append(same("register_tokens", "embeddings.register_tokens", 1, tail=(spec.register_tokens, hidden)))
    rules += layer_rules(spec, names)
    if spec.final_norm:
        rules += norm_rules("layers.final_layernorm", "layernorm", hidden)
    carried = ("embeddings.mask_token", "classifier.*", *unread(spec, names.at, "layernorm"))
    return WeightMap(tuple(rules), carried=carried, prefixes=("", "dinov2.", "dinov2_with_registers."), is_renamed=True)


def weight_map_3(spec: Dinov3Spec) -> WeightMap:
    """Return DINOv3's map; see `encoders.registry.Family.weight_map`."""
    hidden, names = spec.hidden_size, _LAYERS_3
    if spec.activation == GATED:
        names = replace(names, up=("mlp.gate_proj", "mlp.up_proj"))
    rules = [
        *patch_rules(spec, "embeddings.patch_embeddings"),
        same("class_token", "embeddings.cls_token", 1, tail=(1, hidden)),
    ]
    if spec.register_tokens:
        rules.append(same("register_tokens", "embeddings.register_tokens", 1, tail=(spec.register_tokens, hidden)))
    rules += layer_rules(spec, names)
    if spec.final_norm:
        rules += norm_rules("layers.final_layernorm", "norm", hidden)
    carried = ("embeddings.mask_token", *unread(spec, names.at, "norm"))
    if not spec.register_tokens:
        carried = (*carried, "embeddings.register_tokens")  # a tensor without elements
    return WeightMap(tuple(rules), carried=carried, is_renamed=True)
