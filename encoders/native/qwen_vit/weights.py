"""The vision transformer of Qwen2.5-VL in a directory of `transformers`: config, and weights by name."""

from collections.abc import Mapping
from typing import Any

from encoders.base import GATED
from encoders.class_defaults import class_defaults
from encoders.errors import EncoderError
from encoders.native.qwen_vit.spec import QwenVitSpec
from encoders.native.vit.weights import LayerNames, layer_rules, norm_rules, patch_rules
from encoders.pretrained import CLIP_MEAN, CLIP_STD, ConfigFile, image_values, part_of
from encoders.weight_map import WeightMap, same, with_biases

_LAYERS = LayerNames(
    at="blocks.{}.",
    query="attn.qkv",
    key="attn.qkv",
    value="attn.qkv",
    output="attn.proj",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    norms=("norm1", "norm2"),
    fused=True,
)
_PREPROCESSING = {
    "do_resize": True,
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    "resample": 3,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}


def read(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> dict[str, Any]:
    """Read Qwen2.5-VL or its vision part; see `encoders.registry.Family.read`."""
    file = ConfigFile("config.json", part_of(config, "vision_config"), class_defaults("qwen2_5_vl_vision"))
    file.require(in_channels=3, temporal_patch_size=2)
    if file.activation() != "silu":
        raise EncoderError(f"config.json: hidden_act is {file['hidden_act']!r}, and only silu can be built")
    rope = file["rope_parameters"] or {}
    return {
        "family": "qwen_vit",
        "patch_size": file.side("patch_size"),
        "window_size": file["window_size"],
        "full_attention": list(file["fullatt_block_indexes"]),
        "hidden_size": file["hidden_size"],
        "num_layers": file["depth"],
        "num_attention_heads": file["num_heads"],
        "ffn_hidden_size": file["intermediate_size"],
        "activation": GATED,
        "rotary_base": float(rope.get("rope_theta", 10000.0)),
        **preprocessing(preprocessor, file.side("patch_size"), file["spatial_merge_size"]),
    }


def preprocessing(preprocessor: Mapping[str, Any], patch: int, merge: int) -> dict[str, Any]:
    """Return the fields of the spec that a preprocessor's config determines, for patches of side `patch` and tokens of
    `merge` x `merge` patches. Raise EncoderError if our data path does not support it."""
    preprocessor = preprocessor.get("image_processor") or preprocessor
    defaults = _PREPROCESSING if preprocessor else _PREPROCESSING | {"patch_size": patch, "merge_size": merge}
    file = ConfigFile("preprocessor_config.json", preprocessor, defaults)
    file.require(patch_size=patch, temporal_patch_size=2, merge_size=merge)
    size = file["size"]
    pixels = {name: value for name, value in preprocessor.items() if name not in ("size", "do_center_crop")}
    square = {"do_center_crop": True, "crop_size": {"height": 14, "width": 14}}  # has no effect
    images = image_values(pixels, _PREPROCESSING | square, 0, any_size=True)
    return {
        "min_pixels": file.get("min_pixels") or size.get("shortest_edge") or size["min_pixels"],
        "max_pixels": file.get("max_pixels") or size.get("longest_edge") or size["max_pixels"],
        **{name: images[name] for name in ("interpolation", "pixel_mean", "pixel_std")},
    }


def weight_map(spec: QwenVitSpec) -> WeightMap:
    """See `encoders.registry.Family.weight_map`. The patch merger's norm is the encoder's last. Its two linear layers
    belong to the projector."""
    rules = [
        *patch_rules(spec, "patch_embed.proj"),
        *layer_rules(spec, _LAYERS),
        *norm_rules("layers.final_layernorm", "merger.ln_q", spec.hidden_size, bias=False),
    ]
    return WeightMap(tuple(rules), prefixes=("visual.", "model.visual.", ""))


def merger_map(width: int, language_width: int) -> WeightMap:
    """Return the map of the patch merger's linear layers, as a projector's. `width` is that of the merged patches, and
    `language_width` the language model's."""
    sizes = {"encoder.linear_fc1": ("merger.mlp.0", width), "encoder.linear_fc2": ("merger.mlp.2", language_width)}
    rules = with_biases(same(f"{ours}.weight", f"{name}.weight", rows) for ours, (name, rows) in sizes.items())
    return WeightMap(tuple(rules), prefixes=("visual.", "model.visual.", ""))
