"""Projector weights by their names in connectors of published models in `transformers`."""

from collections.abc import Iterator
from dataclasses import replace

from encoders.base import GATED
from encoders.projectors.spec import ProjectorSpec, ResamplerSpec
from encoders.weight_map import Rule, WeightMap, same, stacked, with_biases


def connector(spec: ProjectorSpec, width: int, language_width: int) -> tuple[str, WeightMap] | None:
    """Return (model whose connector computes the same, map of the projector's weights); None if no such model is known.
    `width` is that of joined features."""
    hidden = spec.ffn_hidden_size or language_width
    plain = ProjectorSpec(name=spec.name, merge=spec.merge)
    if spec == replace(plain, kind="linear", bias=False) and spec.merge > 1:
        rules = [same("encoder.weight", "modality_projection.proj.weight", language_width)]
        return "Idefics3", WeightMap(tuple(rules), prefixes=("model.connector.",))
    if spec == replace(plain, norm="LayerNorm", ffn_hidden_size=spec.ffn_hidden_size) and hidden == language_width:
        rules = [
            *_mlp(("linear_1", "linear_2"), hidden, language_width),
            same("norm.weight", "layer_norm.weight", width),
        ]
        rules += [same("norm.bias", "layer_norm.bias", width)]
        return "InternVL", WeightMap(tuple(rules), prefixes=("multi_modal_projector.",))
    usual = ResamplerSpec()
    resampler = replace(
        spec.resampler,
        activation=usual.activation,
        normalization=usual.normalization,
        layernorm_epsilon=usual.layernorm_epsilon,
    )
    gated = replace(plain, ffn_hidden_size=spec.ffn_hidden_size, activation=GATED, bias=False, resampler=resampler)
    wide = spec.resampler.ffn_width(language_width) == 4 * language_width
    if spec == gated and spec.latents and spec.merge == 1 and wide:
        rules = list(_gated("encoder", "modality_projection.", hidden, language_width))
        rules += _resampler(spec.resampler, language_width)
        return "Idefics2", WeightMap(tuple(rules), prefixes=("model.connector.",))
    return None


def _mlp(names: tuple[str, str], hidden: int, language_width: int) -> Iterator[Rule]:
    rows = (hidden, language_width)
    layers = zip(("encoder.linear_fc1", "encoder.linear_fc2"), names, rows, strict=True)
    yield from with_biases(same(f"{ours}.weight", f"{theirs}.weight", count) for ours, theirs, count in layers)


def _gated(ours: str, theirs: str, hidden: int, language_width: int) -> Iterator[Rule]:
    yield stacked(f"{ours}.linear_fc1.weight", [(f"{theirs}{part}_proj.weight", hidden) for part in ("gate", "up")])
    yield same(f"{ours}.linear_fc2.weight", f"{theirs}down_proj.weight", language_width)


_NORMS = {"latents": "input_latents_norm", "features": "input_context_norm", "mlp": "post_attention_layernorm"}


def _resampler(spec: ResamplerSpec, width: int) -> Iterator[Rule]:
    at = "perceiver_resampler."
    yield same("resampler.latents", f"{at}latents", spec.latents)
    yield same("resampler.norm.weight", f"{at}norm.weight", width)
    query, key = (heads * spec.head_width(width) for heads in (spec.num_attention_heads, spec.key_heads))
    for number in range(spec.num_layers):
        ours, theirs = f"resampler.layers.{number}.", f"{at}layers.{number}."
        for name, their in _NORMS.items():
            yield same(f"{ours}{name}_norm.weight", f"{theirs}{their}.weight", width)
        for name, their, rows in (("q", "q", query), ("k", "k", key), ("v", "v", key), ("proj", "o", width)):
            yield same(f"{ours}linear_{name}.weight", f"{theirs}self_attn.{their}_proj.weight", rows)
        yield from _gated(f"{ours}mlp", f"{theirs}mlp.", spec.ffn_width(width), width)
