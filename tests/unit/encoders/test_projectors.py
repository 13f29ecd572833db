"""Rows, parameters and faults of projectors."""

import pytest

from encoders.base import most_tokens, num_tokens
from encoders.native.vit.patch_spec import VisionSpec
from encoders.native.whisper.spec import QwenAudioSpec
from encoders.projectors.spec import ProjectorSpec, ResamplerSpec
from mimo_train.config.compose import load
from mimo_train.config.errors import ConfigError
from mimo_train.estimate.matmuls import Media, encoder_matmuls
from mimo_train.layout.run import resolve

SEVEN = ResamplerSpec(
    latents=7, num_layers=2, num_attention_heads=4, num_query_groups=2, head_size=5, activation="gelu"
)


def test_a_resampler_makes_as_many_rows_of_any_image():
    native = VisionSpec(resize="native", image_size=64)
    for extent in ((16, 16), (64, 32), (500, 20)):
        assert num_tokens(native, ProjectorSpec(resampler=SEVEN), *extent) == 7
    assert most_tokens(native, ProjectorSpec(resampler=SEVEN)) == 7
    assert most_tokens(native, ProjectorSpec()) == native.most_tokens()


@pytest.mark.parametrize(
    ("spec", "split", "whole"),
    [
        (ProjectorSpec(ffn_hidden_size=6), 8 * 6 + 6 + 6 * 4, 4),
        (ProjectorSpec(ffn_hidden_size=6, activation="swiglu"), 8 * 12 + 12 + 6 * 4, 4),
        (ProjectorSpec(kind="linear", bias=False, norm="LayerNorm"), 8 * 4, 16),
        (
            ProjectorSpec(kind="linear", norm="RMSNorm", resampler=SEVEN),
            8 * 4 + 4 + 2 * (2 * 4 * 20 + 2 * 4 * 10 + 2 * 4 * 16),
            8 + 7 * 4 + 7 * 4,
        ),
    ],
)
def test_parameters(spec, split, whole):
    assert not spec.faults()
    assert spec.parameters(8, 4) == (split, whole)
    assert spec.num_parameters(8, 4) == split + whole


def test_products_of_a_resampler():
    """Keys and values of all features and latents, the rest of the latents alone."""
    spec = ProjectorSpec(kind="linear", resampler=SEVEN)
    media = Media(patches=30, tokens=30, latents=14)  # of two images
    found = {one.name: one for one in encoder_matmuls("images", VisionSpec(), spec, 4, media)}
    layer = "input_projections.0.resampler.layers.1"
    assert found["input_projections.0.encoder.weight"].forward == 2 * 30 * 768 * 4
    assert found[f"{layer}.linear_q.weight"].forward == 2 * 14 * 4 * 20
    assert found[f"{layer}.linear_k.weight"].forward == 2 * 44 * 4 * 10
    assert found[f"{layer}.linear_v.weight"].attention == 4 * 7 * 44 * 20
    assert found[f"{layer}.mlp.linear_fc2.weight"].forward == 2 * 14 * 16 * 4


@pytest.mark.parametrize(
    ("spec", "field", "words"),
    [
        (ProjectorSpec(kind="resampler"), "kind", "mlp, linear or none"),
        (ProjectorSpec(kind="linear", activation="relu"), "activation", "does not use it"),
        (ProjectorSpec(kind="linear", ffn_hidden_size=4), "ffn_hidden_size", "does not use it"),
        (ProjectorSpec(kind="none", merge=2), "merge", "does not use it"),
        (ProjectorSpec(norm="BatchNorm"), "norm", "LayerNorm"),
        (ProjectorSpec(norm_epsilon=1e-6), "norm_epsilon", "no norm"),
        (ProjectorSpec(resampler=ResamplerSpec(num_layers=2)), "resampler.num_layers", "latents 0"),
        (ProjectorSpec(resampler=ResamplerSpec(latents=1, num_query_groups=3)), "resampler.num_query_groups", "16"),
        (ProjectorSpec(resampler=ResamplerSpec(latents=1, activation="geglu")), "resampler.activation", "swiglu"),
        (ProjectorSpec(resampler=ResamplerSpec(latents=1, normalization="x")), "resampler.normalization", "RMSNorm"),
    ],
)
def test_impossible_values_are_named(spec, field, words):
    assert [text for name, text in spec.faults() if name == field and words in text], spec.faults()


PLACE = "modules.images.projector"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ([f"{PLACE}.resampler.num_attention_heads=5"], f"{PLACE}.resampler.num_attention_heads"),
        (
            [f"{PLACE}.resampler.num_query_groups=1", "modules.images.layout.tp=2", "layout=images_tp2_language_pp2"],
            "modules.images.layout.tp",
        ),
        (["modules.images.prefetch_microbatches=1", "modules.images.freeze=[encoder]"], "modules.images.prefetch"),
        (["modules.images.feature_cache.dir=x", "modules.images.freeze=[encoder]"], "modules.images.feature_cache.dir"),
        ([f"{PLACE}.resampler.layernorm_epsilon=nan"], f"{PLACE}.resampler.layernorm_epsilon"),
    ],
)
def test_what_does_not_go_with_a_resampler_is_named(overrides, key):
    sizes = [f"{PLACE}.resampler.latents=4", f"{PLACE}.resampler.num_attention_heads=4"]
    with pytest.raises(ConfigError) as error:
        resolve(load("vlm_digits", [*sizes, *overrides]))
    assert any(line.startswith(key) for line in str(error.value).splitlines()), error.value


def test_a_projector_that_tensor_parallelism_does_not_divide_is_named():
    with pytest.raises(ConfigError, match=r"tp 2 does not divide modules.images.projector.ffn_hidden_size 7"):
        resolve(load("vlm_digits", [f"{PLACE}.ffn_hidden_size=7", "layout=images_tp2_language_pp2"]))


@pytest.mark.parametrize(
    ("samples", "frames", "tokens"), [(641, 3, 1), (1000, 4, 2), (7001, 22, 11), (480000, 1500, 750)]
)
def test_tokens_of_a_clip_of_qwen2_audio(samples, frames, tokens):
    """Of L windows ((L - 1) // 2 + 1 - 2) // 2 + 1, the family's rule."""
    spec = QwenAudioSpec()
    windows = -(-samples // 160)
    assert tokens == ((windows - 1) // 2 + 1 - 2) // 2 + 1
    assert (spec.inner_tokens(samples, 16000), spec.num_tokens(samples, 16000)) == (frames, tokens)
    size = spec.input_size(samples, 16000)
    assert spec.input_size(*size) == size
    assert spec.num_tokens(samples, 16000, 2) == -(-frames // 4)
    assert spec.joined_width(2) == 2 * spec.hidden_size


def test_clips_that_make_no_token_and_keys_that_mean_nothing_are_named():
    from encoders.errors import EncoderError

    spec = QwenAudioSpec()
    with pytest.raises(EncoderError, match="1 frame of 320 samples makes no token"):
        spec.num_tokens(320, 16000)
    for keys in ({"pad_clips": True}, {"padded_seconds": 20.0}, {"max_seconds": 0.01}):
        (name,) = keys
        assert [text for field, text in QwenAudioSpec(**keys).faults() if field == name], keys
