"""Weight rules that all transformers over patches share."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from encoders.base import GATED, LayeredSpec
from encoders.native.vit.patch_spec import PatchSpec
from encoders.weight_map import Rows, Rule, heads, same, stacked, with_biases


@dataclass(frozen=True)
class LayerNames:
    """Names in a directory, without `.weight` and `.bias`; `{}` is the number of a layer."""

    at: str
    """Prefix of all other names."""
    query: str
    key: str
    value: str
    output: str
    up: tuple[str, ...]
    """Layers before the activation function: one, or gate and up of a gated block."""
    down: str
    norms: tuple[str, str]
    """Norms before attention, and before the feed-forward block."""
    scales: tuple[str, ...] = ()
    """Full names of the scales after attention and after the feed-forward block."""
    key_bias: bool = True
    fused: bool = False
    """True if `query` is one tensor with the rows of all queries, then all keys, then all values."""


def layer_rules(spec: LayeredSpec, names: LayerNames) -> Iterator[Rule]:
    """Yield the rules of all layers that are built."""
    for number in range(spec.built_layers):
        yield from _one_layer(spec, names, f"layers.layers.{number}", names.at.format(number))


def unread(spec: LayeredSpec, at: str, norm: str) -> tuple[str, ...]:
    """Return patterns of the tensors of layers after the one that is read, and of the last norm (`norm`) if it is not
    applied. `at` is the prefix of a layer's names, with `{}` for its number."""
    layers = [f"{at.format(number)}*" for number in range(spec.built_layers, spec.num_layers)]
    return (*layers, *(() if spec.final_norm else (f"{norm}.*",)))


def norm_rules(ours: str, theirs: str, width: int, *, bias: bool = True) -> Iterator[Rule]:
    """Yield the rules of a norm; names are without `.weight` and `.bias`."""
    for part in ("weight", "bias") if bias else ("weight",):
        yield same(f"{ours}.{part}", f"{theirs}.{part}", width)


def patch_rules(spec: PatchSpec, theirs: str) -> Iterator[Rule]:
    """Yield the rules of the patch embedding, a convolution; the name is without `.weight` and `.bias`."""
    side, frames = spec.patch_size, spec.patch_frames
    tail = (3, *((frames,) if frames > 1 else ()), side, side)
    rules = [same("patch_embedding.weight", f"{theirs}.weight", spec.hidden_size, tail=tail)]
    yield from with_biases(rules) if spec.patch_bias else rules


def _one_layer(spec: LayeredSpec, names: LayerNames, ours: str, theirs: str) -> Iterator[Rule]:
    hidden, ffn = spec.hidden_size, spec.ffn_hidden_size
    bias = spec.normalization == "LayerNorm"
    for norm, name in zip(("input_layernorm", "pre_mlp_layernorm"), names.norms, strict=True):
        yield from norm_rules(f"{ours}.{norm}", f"{theirs}{name}", hidden, bias=bias)
    yield from _attention(spec, names, f"{ours}.self_attention.linear_qkv", theirs)
    assert len(names.up) == (2 if spec.activation == GATED else 1), names.up
    yield from with_biases(
        [
            same(f"{ours}.self_attention.linear_proj.weight", f"{theirs}{names.output}.weight", hidden),
            stacked(f"{ours}.mlp.linear_fc1.weight", _up(theirs, names, ffn)),
            same(f"{ours}.mlp.linear_fc2.weight", f"{theirs}{names.down}.weight", hidden),
        ]
    )
    for branch, name in zip(("self_attn_bda", "mlp_bda"), names.scales, strict=False):
        yield same(f"{ours}.{branch}.scale", f"{theirs}{name}", hidden)


def _up(theirs: str, names: LayerNames, ffn: int) -> list[tuple[str, int]]:
    """Return (name, rows) of the weights before the activation function. If gate and up are one tensor, both have its
    name."""
    parts = [f"{theirs}{name}.weight" for name in names.up]
    return [(parts[0], len(parts) * ffn)] if len(set(parts)) == 1 else [(part, ffn) for part in parts]


def _attention(spec: LayeredSpec, names: LayerNames, ours: str, theirs: str) -> Iterator[Rule]:
    hidden, count = spec.hidden_size, spec.num_attention_heads
    firsts = (0, hidden, 2 * hidden) if names.fused else ()
    sizes: dict[str, Any] = {"groups": count, "per_group": 1, "size": hidden // count, "firsts": firsts}
    parts = [f"{theirs}{name}" for name in (names.query, names.key, names.value)]
    query, key, value = (f"{part}.weight" for part in parts)
    yield heads(f"{ours}.weight", query, key, value, **sizes)
    query, key, value = (f"{part}.bias" for part in parts)
    rule = heads(f"{ours}.bias", query, key if names.key_bias else "", value, **sizes)
    yield Rule(rule.ours, tuple(row if row.name else Rows("", row.count) for row in rule.rows))
