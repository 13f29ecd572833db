"""The vision transformers of Qwen2.5-VL and Qwen3-VL in a directory of `transformers`: config, and weights by name."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from encoders.base import GATED
from encoders.errors import EncoderError
from encoders.native.qwen_vit.spec import Qwen3VitSpec, QwenVitSpec
from encoders.native.vit.weights import LayerNames, layer_rules, norm_rules, patch_rules
from encoders.pretrained import CLIP_MEAN, CLIP_STD, PIXELS, ConfigFile, class_defaults, image_values, part_of
from encoders.weight_map import Rule, WeightMap, same, with_biases

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
_LAYERS_QWEN3 = replace(_LAYERS, up=("mlp.linear_fc1",), down="mlp.linear_fc2")
_PREFIXES_QWEN3 = ("model.visual.", "visual.", "")
_PREPROCESSING = PIXELS | {
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    "resample": 3,
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
    return {
        "family": "qwen_vit",
        "window_size": file["window_size"],
        "full_attention": list(file["fullatt_block_indexes"]),
        **_sizes(file),
        "activation": GATED,
        **preprocessing(preprocessor, file.side("patch_size"), file["spatial_merge_size"]),
    }


def _sizes(file: ConfigFile) -> dict[str, Any]:
    return {
        "patch_size": file.side("patch_size"),
        "hidden_size": file["hidden_size"],
        "num_layers": file["depth"],
        "num_attention_heads": file["num_heads"],
        "ffn_hidden_size": file["intermediate_size"],
        "rotary_base": float((file["rope_parameters"] or {}).get("rope_theta", 10000.0)),
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


def read_qwen3(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> dict[str, Any]:
    """Read Qwen3-VL or its vision part; see `encoders.registry.Family.read`."""
    file = ConfigFile("config.json", part_of(config, "vision_config"), class_defaults("qwen3_vl_vision"))
    file.require(in_channels=3, temporal_patch_size=2)
    positions = file["num_position_embeddings"]
    side = round(positions**0.5)
    if side**2 != positions:
        raise EncoderError(f"config.json: num_position_embeddings is {positions}, which is no square")
    patch = file.side("patch_size")
    return {
        "family": "qwen3_vit",
        "image_size": side * patch,
        **_sizes(file),
        "activation": file.activation(),
        "deepstack": list(file["deepstack_visual_indexes"]),
        "deepstack_width": file["out_hidden_size"],
        "merge_size": file["spatial_merge_size"],
        **(preprocessing(preprocessor, patch, file["spatial_merge_size"]) if preprocessor else {}),
    }


def weight_map_qwen3(spec: Qwen3VitSpec) -> WeightMap:
    """See `encoders.registry.Family.weight_map`. The patch merger's norm is the encoder's last. Its two linear layers
    belong to the projector."""
    rules = [
        *patch_rules(spec, "patch_embed.proj"),
        same("position_embedding", "pos_embed.weight", (spec.image_size // spec.patch_size) ** 2),
        *layer_rules(spec, _LAYERS_QWEN3),
        *norm_rules("layers.final_layernorm", "merger.norm", spec.hidden_size),
    ]
    width = spec.merged_width
    for number in range(len(spec.deepstack)):
        ours, theirs = f"deepstack.{number}.", f"deepstack_merger_list.{number}."
        rules += norm_rules(f"{ours}norm", f"{theirs}norm", width)
        rules += _linears(ours, theirs, width, spec.deepstack_width)
    return WeightMap(tuple(rules), prefixes=_PREFIXES_QWEN3)


def merger_map_qwen3(width: int, language_width: int) -> WeightMap:
    """See `merger_map`."""
    return WeightMap(tuple(_linears("encoder.", "merger.", width, language_width)), prefixes=_PREFIXES_QWEN3)


def _linears(ours: str, theirs: str, width: int, language_width: int) -> Iterator[Rule]:
    sizes = {"linear_fc1": width, "linear_fc2": language_width}
    yield from with_biases(same(f"{ours}{name}.weight", f"{theirs}{name}.weight", rows) for name, rows in sizes.items())
