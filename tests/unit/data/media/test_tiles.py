"""Tiles of images, and the tokens that they take, are those of transformers' image processors and processors."""

import io

import pytest
import torch
from PIL import Image

from data.media.decode import Resize, decode_image_file, fitted
from encoders.base import joint_faults
from encoders.native.clip.spec import ClipSpec, SiglipSpec
from encoders.native.vit.tiles import UNCUT
from encoders.projectors.spec import ProjectorSpec, ResamplerSpec
from tests.unit.data.media.test_preprocessing import embedder, image

PINPOINTS = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]
SIZES = [(97, 131), (300, 61), (56, 56), (113, 517), (40, 41), (61, 55), (224, 223), (1000, 30)]
"""(height, width) of images."""
SQUARES = [[56 * rows, 56 * columns] for rows in range(1, 5) for columns in range(1, 5)]


def next_case():
    from transformers import LlavaNextImageProcessor, LlavaNextProcessor

    side = {"height": 56, "width": 56}
    images = LlavaNextImageProcessor(size={"shortest_edge": 56}, crop_size=side, image_grid_pinpoints=PINPOINTS)
    pixels = {"pixel_mean": images.image_mean, "pixel_std": images.image_std}
    spec = ClipSpec(resize="tiles", image_size=56, patch_size=7, grid_pinpoints=PINPOINTS, **pixels)
    return spec, images, LlavaNextProcessor, {"patch_size": 7, "num_additional_image_tokens": 1}


def onevision_case():
    from transformers import LlavaOnevisionImageProcessor, LlavaOnevisionProcessor

    size = {"height": 56, "width": 56}
    images = LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=SQUARES, image_mean=[0.5, 0.4, 0.3])
    # 8 patches of 6 pixels, and 8 pixels that are not read.
    pixels = {"pixel_mean": images.image_mean, "pixel_std": images.image_std, "image_size": 56, "patch_size": 6}
    spec = SiglipSpec(resize="tiles", grid_pinpoints=SQUARES, max_tiles=3, cut_several=False, **pixels)
    own = {"num_image_tokens": 81, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_3"}
    return spec, images, LlavaOnevisionProcessor, own


def normalised(spec, tiles: torch.Tensor) -> torch.Tensor:
    own = embedder(spec)
    return (tiles.float() - own.pixel_mean) / own.pixel_std


@pytest.mark.parametrize("case", [next_case, onevision_case])
def test_pixels_and_tokens(case):
    spec, images, processor, options = case()
    counter = processor.__new__(processor)
    counter.image_processor, counter.vision_feature_select_strategy = images, "default"
    for name, value in options.items():
        setattr(counter, name, value)
    resize = Resize(tile=56, background=spec.transform.background)
    pooled, cut = 0, set()
    for size in SIZES:
        raw = image(*size)
        found = images(Image.open(io.BytesIO(raw)), return_tensors="pt")
        tiles = fitted(decode_image_file(raw), (56, 56), resize, spec.canvas(*size))
        assert torch.equal(normalised(spec, tiles), found.pixel_values[0]), size
        tiling = spec.tiling(*size)
        assert len(tiles) == tiling.tiles
        expected = counter._get_number_of_features(*size, 56, 56) - (
            counter.vision_feature_select_strategy == "default"
        )
        assert spec.num_tokens(*size) == expected, size
        assert (
            spec.num_tokens(*size) <= spec.most_tokens()
            and tiling.tiles * spec.token_unit() <= spec.most_inner_tokens()
        )
        pooled, cut = pooled + (tiling.pooled is not None), cut | {(tiling.top > 0, tiling.left > 0)}
    assert {(True, False), (False, True), (False, False)} <= cut and bool(pooled) == bool(spec.max_tiles)


def test_of_several_images_each_is_a_square():
    spec, images, _, _ = onevision_case()
    raws = [image(*size) for size in SIZES[:2]]
    found = images([[Image.open(io.BytesIO(raw)) for raw in raws]], return_tensors="pt").pixel_values
    resize = Resize(tile=56, background=spec.transform.background)
    for raw, theirs in zip(raws, found, strict=True):
        assert torch.equal(
            normalised(spec, fitted(decode_image_file(raw), (56, 56), resize, spec.canvas(*UNCUT))), theirs
        )
    assert spec.num_tokens(*UNCUT) == 9**2 + 1 and spec.inner_tokens(*UNCUT) == 81


def test_what_cannot_be_built_is_named():
    tiles = {"resize": "tiles", "image_size": 56, "patch_size": 7}
    for keys, field in [
        ({**tiles}, "grid_pinpoints"),
        ({**tiles, "grid_pinpoints": [[56, 100]]}, "grid_pinpoints"),
        ({"grid_pinpoints": [[224, 448]]}, "grid_pinpoints"),
        ({"cut_several": False}, "cut_several"),
    ]:
        assert [name for name, _ in ClipSpec(**keys).faults()] == [field], keys
    spec = ClipSpec(**tiles, grid_pinpoints=PINPOINTS)
    assert not spec.faults() and not joint_faults(spec, ProjectorSpec(newline=True))
    assert joint_faults(spec, ProjectorSpec())[0][0] == "projector.newline"
    assert joint_faults(ClipSpec(), ProjectorSpec(newline=True))[0][0] == "projector.newline"
    latents = ProjectorSpec(newline=True, resampler=ResamplerSpec(latents=4))
    assert joint_faults(spec, latents)[0][0] == "projector.resampler.latents"
    assert joint_faults(spec, ProjectorSpec(newline=True, merge=2))[0][0] == "projector.merge"
