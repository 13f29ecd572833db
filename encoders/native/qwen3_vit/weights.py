"""The vision transformer of Qwen3-VL in a directory of `transformers`: config, and weights by name."""

from collections.abc import Iterator, Mapping
from typing import Any

from encoders.class_defaults import class_defaults
from encoders.errors import EncoderError
from encoders.native.qwen3_vit.spec import Qwen3VitSpec
from encoders.native.qwen_vit.weights import preprocessing
from encoders.native.vit.weights import LayerNames, layer_rules, norm_rules, patch_rules
from encoders.pretrained import ConfigFile, part_of
from encoders.weight_map import Rule, WeightMap, same, with_biases

_LAYERS = LayerNames(
    at="blocks.{}.",
    query="attn.qkv",
    key="attn.qkv",
    value="attn.qkv",
    output="attn.proj",
    up=("mlp.linear_fc1",),
    down="mlp.linear_fc2",
    norms=("norm1", "norm2"),
    fused=True,
)
PREFIXES = ("model.visual.", "visual.", "")


def read(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> dict[str, Any]:
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
        "patch_size": patch,
        "hidden_size": file["hidden_size"],
        "num_layers": file["depth"],
        "num_attention_heads": file["num_heads"],
        "ffn_hidden_size": file["intermediate_size"],
        "activation": file.activation(),
        "rotary_base": float((file["rope_parameters"] or {}).get("rope_theta", 10000.0)),
        "deepstack": list(file["deepstack_visual_indexes"]),
        "deepstack_width": file["out_hidden_size"],
        "merge_size": file["spatial_merge_size"],
        **(preprocessing(preprocessor, patch, file["spatial_merge_size"]) if preprocessor else {}),
    }


def weight_map(spec: Qwen3VitSpec) -> WeightMap:
    """See `encoders.registry.Family.weight_map`. The patch merger's norm is the encoder's last. Its two linear layers
    belong to the projector."""
    rules = [
        *patch_rules(spec, "patch_embed.proj"),
        same("position_embedding", "pos_embed.weight", (spec.image_size // spec.patch_size) ** 2),
        *layer_rules(spec, _LAYERS),
        *norm_rules("layers.final_layernorm", "merger.norm", spec.hidden_size),
    ]
    width = spec.merged_width
    for number in range(len(spec.deepstack)):
        ours, theirs = f"deepstack.{number}.", f"deepstack_merger_list.{number}."
        rules += norm_rules(f"{ours}norm", f"{theirs}norm", width)
        rules += _linears(ours, theirs, width, spec.deepstack_width)
    return WeightMap(tuple(rules), prefixes=PREFIXES)


def merger_map(width: int, language_width: int) -> WeightMap:
    """See `encoders.native.qwen_vit.weights.merger_map`."""
    return WeightMap(tuple(_linears("encoder.", "merger.", width, language_width)), prefixes=PREFIXES)


def _linears(ours: str, theirs: str, width: int, language_width: int) -> Iterator[Rule]:
    sizes = {"linear_fc1": width, "linear_fc2": language_width}
    yield from with_biases(same(f"{ours}{name}.weight", f"{theirs}{name}.weight", rows) for name, rows in sizes.items())
