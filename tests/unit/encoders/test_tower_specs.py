"""Sizes, tokens and faults of the families whose weights are published."""

from dataclasses import replace

import pytest
import torch

from encoders.errors import EncoderError
from encoders.native.clip.spec import ClipSpec, Siglip2Spec, SiglipSpec
from encoders.native.dino.spec import Dinov2Spec, Dinov3Spec
from encoders.native.qwen_vit.model import _patch_order, _window_lengths
from encoders.native.qwen_vit.spec import QwenVitSpec
from encoders.native.whisper.spec import WhisperSpec
from encoders.projectors.spec import ProjectorSpec
from encoders.registry import FAMILIES
from mimo_train.estimate.matmuls import Media, encoder_matmuls
from mimo_train.estimate.parameters import encoder_parameters
from mimo_train.models.blocks.base import Share
from mimo_train.models.blocks.encoder_layer import encoder_layer

ONE, TWO = ProjectorSpec(kind="linear"), ProjectorSpec(merge=2)
QWEN = QwenVitSpec(patch_size=7, window_size=28, min_pixels=100, max_pixels=20000, num_layers=4, full_attention=[1])


@pytest.mark.parametrize(
    ("spec", "millions"),
    [
        (ClipSpec(), 85.8),
        (ClipSpec(patch_size=14, hidden_size=1024, num_layers=24, num_attention_heads=16, ffn_hidden_size=4096), 303.2),
        (SiglipSpec(), 85.8),
        (Dinov2Spec(hidden_size=1024, num_layers=24, num_attention_heads=16, ffn_hidden_size=4096), 304.4),
        (Dinov3Spec(hidden_size=1024, num_layers=24, num_attention_heads=16, ffn_hidden_size=4096), 303.1),
        (QwenVitSpec(), 632.0),
    ],
)
def test_published_sizes(spec, millions):
    assert spec.num_parameters() / 1e6 == pytest.approx(millions, abs=0.06)
    assert not spec.faults() + spec.joint_faults(1)


def test_layers_behind_the_one_that_is_read_are_not_built():
    spec = ClipSpec(num_layers=5, feature_layer=-3)
    assert spec.built_layers == 3
    layer, norm = spec.layer_parameters, spec.norm_parameters
    assert ClipSpec(num_layers=5).num_parameters() - spec.num_parameters() == 2 * layer
    assert replace(spec, final_norm=True).num_parameters() - spec.num_parameters() == norm
    stages = [encoder_parameters(spec, stage=stage, stages=2) for stage in (0, 1)]
    assert (sum(stages), stages[1]) == (spec.num_parameters(), layer)


@pytest.mark.parametrize(
    ("spec", "field", "words"),
    [
        (ClipSpec(feature_layer=0), "feature_layer", "from -12"),
        (ClipSpec(feature_layer=-13), "feature_layer", "is -13"),
        (ClipSpec(shortest_edge=200), "shortest_edge", "image_size 224"),
        (ClipSpec(resize="fixed", shortest_edge=240), "shortest_edge", "cuts nothing"),
        (ClipSpec(interpolation="nearest"), "interpolation", "'nearest'"),
        (ClipSpec(activation="tanh"), "activation", "swiglu"),
        (SiglipSpec(resize="native", image_size=384, patch_size=14), "patch_size", "image_size 384"),
        (Siglip2Spec(resize="fixed"), "resize", "family siglip"),
        (Siglip2Spec(max_pixels=4), "max_pixels", "max_patches"),
        (Dinov2Spec(position_size=500), "patch_size", "position_size 500"),
        (Dinov3Spec(num_attention_heads=128), "num_attention_heads", "multiple of 4"),
        (QwenVitSpec(full_attention=[32]), "full_attention", "[32]"),
        (QwenVitSpec(window_size=100), "window_size", "patch_size 14"),
    ],
)
def test_impossible_values_are_named(spec, field, words):
    found = spec.faults()
    assert [text for name, text in found if name == field and words in text], found


@pytest.mark.parametrize(
    ("spec", "merge", "field"),
    [
        (ClipSpec(keep_class_token=True), 2, "encoder.keep_class_token"),
        (ClipSpec(keep_class_token=True, resize="native"), 1, "encoder.keep_class_token"),
        (Siglip2Spec(max_patches=3), 2, "encoder.max_patches"),
        (QwenVitSpec(), 9, "encoder.window_size"),
    ],
)
def test_what_does_not_go_together_is_named(spec, merge, field):
    assert [name for name, _ in spec.joint_faults(merge)] == [field]


def test_a_class_token_in_the_sequence_is_counted_as_what_it_is():
    spec = ClipSpec(image_size=32, patch_size=16, keep_class_token=True)
    assert (spec.num_tokens(9, 9), spec.inner_tokens(9, 9), spec.most_tokens()) == (5, 5, 5)
    assert spec.patches_of(15, ONE.merge) == pytest.approx(12)
    products = encoder_matmuls("images", spec, ONE, 6, Media(patches=4, tokens=5, pairs=25, kept=1))
    assert products[0].forward == 2 * 4 * 3 * 16**2 * 768 and products[-1].forward == 2 * 5 * 768 * 6


def test_a_gated_layer_has_two_matrices_in_front():
    plain = Dinov2Spec(hidden_size=8, num_attention_heads=2, ffn_hidden_size=12, num_layers=1)
    gated = replace(plain, activation="swiglu")
    assert gated.num_parameters() - plain.num_parameters() == 8 * 12 + 12
    assert encoder_parameters(plain, tp=2) - encoder_parameters(gated, tp=2) == -(8 * 12 + 12) // 2
    (first, *_), (other, *_) = (
        [one for one in encoder_matmuls("images", spec, ONE, 4, Media(1, 1, 1)) if "linear_fc1" in one.name]
        for spec in (plain, gated)
    )
    assert other.forward == 2 * first.forward


def test_a_scaled_branch_keeps_what_is_scaled():
    scaled = encoder_layer(Dinov2Spec(hidden_size=8, num_attention_heads=2, ffn_hidden_size=16, layer_scale=1.0))
    assert scaled.kept(Share(10, 4)) - replace(scaled, scaled=False).kept(Share(10, 4)) == 10 * 2 * 8 * 4


def test_windows_of_a_image():
    """Of 5 x 3 tokens of four patches, in windows of 2 x 2 tokens."""
    assert QWEN.grid(70, 42, merge=2) == (10, 6)
    assert QWEN.window_tokens(10, 6, 2) == [16, 8, 16, 8, 8, 4]
    windows = 2 * 16**2 + 3 * 8**2 + 4**2
    assert QWEN.attention_pairs(70, 42, merge=2) == (60**2 + 3 * windows) // 4
    order = _patch_order(10, 6, 2, 2)
    assert sorted(order.tolist()) == list(range(60))
    assert order[:8].tolist() == [0, 1, 6, 7, 2, 3, 8, 9]  # two tokens of the first window
    assert order[16:20].tolist() == [24, 25, 30, 31]  # the next window of four tokens, behind which smaller ones are
    assert order[32:36].tolist() == [4, 5, 10, 11]
    assert _window_lengths(5, 3, 2) == (4, 4, 2, 2, 2, 1)
    assert ClipSpec().attention_pairs(9, 9) == 197**2


def test_window_attention_is_attention_under_a_mask():
    from mimo_train.models.attention import WindowAttention
    from mimo_train.models.documents import documents_of_media

    images, windows = torch.tensor([7, 5]), torch.tensor([3, 2, 2, 4, 1])
    query, key, value = torch.randn(3, 12, 1, 4, 5)
    layer = WindowAttention.__new__(WindowAttention)
    torch.nn.Module.__init__(layer)
    layer.is_causal, layer.softmax_scale, layer.dropout = False, None, 0.0
    layer.window, layer.softcap, layer.cp_group = 0, 0.0, None
    packed = documents_of_media(images.tolist(), windows.tolist())
    for layer.everywhere, lengths in ((False, windows), (True, images)):
        number = torch.arange(len(lengths)).repeat_interleave(lengths)
        mask = number[:, None] == number
        parts = [tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)]
        expected = torch.nn.functional.scaled_dot_product_attention(*parts, attn_mask=mask)
        found = layer(query, key, value, packed_seq_params=packed)
        torch.testing.assert_close(found, expected.permute(2, 0, 1, 3).flatten(2))


def test_clips_may_be_filled_up():
    spec = WhisperSpec(pad_clips=True, max_seconds=1.1)
    assert spec.input_size(100, 16000) == (17600, 16000) and not spec.sizes_vary
    assert spec.num_tokens(100, 16000) == spec.most_tokens() == spec.token_unit() == 55
    with pytest.raises(EncoderError, match="max_seconds"):
        spec.num_tokens(17601, 16000)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.weights])
def test_every_tensor_of_a_map_is_whole(name):
    family = FAMILIES[name]
    spec = family.spec(**({"key_bias": False} if name == "whisper" else {}))
    assert min(family.weight_map(spec).row_counts().values()) > 0


@pytest.mark.parametrize("kind", [kind for family in FAMILIES.values() for kind in family.readers])
def test_a_directory_without_a_preprocessor_is_read(kind):
    family = next(family for family in FAMILIES.values() if kind in family.readers)
    values = family.read({"model_type": kind}, {})
    spec = family.spec(**{name: value for name, value in values.items() if name != "family"})
    assert not spec.faults()


def test_a_image_has_at_least_one_patch():
    """Pixels that make no whole patch are not read: of an image below a patch, none."""
    assert not SiglipSpec(image_size=14, patch_size=14).faults()
    assert SiglipSpec(image_size=13, patch_size=14).faults() == [("patch_size", "14 is above image_size 13: lower it")]
