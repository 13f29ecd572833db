"""Pixels of our data path are those of transformers' default image processors, bit for bit."""

import io
import json
from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest
import torch
from PIL import Image

from data.media.decode import Resize, decode_image_file, fitted
from encoders.errors import EncoderError
from encoders.native.vit.model import VisionTransformer
from encoders.native.vit.patch_spec import PatchSpec
from encoders.pretrained import preprocessor_config
from encoders.registry import FAMILIES

SIZES = [(97, 131), (300, 61), (48, 48), (230, 517)]
"""(height, width) of images."""

CLIP = {"image_size": 56, "patch_size": 14}
CROP = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}


def image(height: int, width: int) -> bytes:
    """A PNG file of smooth shades with noise."""
    rows, columns = np.mgrid[0:height, 0:width]
    shades = np.stack([rows * 255 / height, columns * 255 / width, (rows + columns) % 256], axis=-1)
    noise = np.random.default_rng(height).integers(-40, 40, shades.shape)
    buffer = io.BytesIO()
    Image.fromarray(np.clip(shades + noise, 0, 255).astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def embedder(spec: PatchSpec) -> VisionTransformer:
    """What of an encoder makes patches of pixels."""

    class Embedder(VisionTransformer):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.spec, self.merge = spec, 1
            self.patch_embedding = torch.nn.Linear(1, 1)
            for name in ("pixel_mean", "pixel_std"):
                setattr(self, name, 255 * torch.tensor(getattr(spec, name)).view(1, -1, 1, 1))

    return Embedder()


def spec_of(model_type: str, config: dict, preprocessor: dict) -> PatchSpec:
    family = next(family for family in FAMILIES.values() if model_type in family.readers)
    return family.spec(**family.read({"model_type": model_type, **config}, preprocessor))


def ours(spec: PatchSpec, raw: bytes, size: tuple[int, int], merge: int) -> torch.Tensor:
    """Patches as the encoder multiplies them."""
    resize = Resize(**asdict(spec.transform))
    encoder, pixels = embedder(spec), fitted(decode_image_file(raw), spec.input_size(*size, merge=merge), resize)
    return encoder._patches(pixels[None], Counter([encoder._grid(pixels.shape[1:])]))


def patches_of(pixels: torch.Tensor, spec: PatchSpec) -> torch.Tensor:
    """Normalised pixels [3, height, width] in patches, row by row."""
    side = spec.patch_size
    return pixels.unfold(1, side, side).unfold(2, side, side).permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("processor", "options", "model_type", "config"),
    [
        ("CLIPImageProcessor", CROP, "clip_vision_model", CLIP),
        ("CLIPImageProcessor", {**CROP, "size": {"shortest_edge": 71}, "resample": 2}, "clip_vision_model", CLIP),
        ("LlavaImageProcessor", {**CROP, "size": {"shortest_edge": 61}}, "clip_vision_model", CLIP),
        ("SiglipImageProcessor", {"size": {"height": 60, "width": 60}}, "siglip", CLIP | {"image_size": 60}),
        ("BitImageProcessor", {**CROP, "size": {"shortest_edge": 65}}, "dinov2", {**CLIP, "image_size": 70}),
    ],
)
def test_squares(processor, options, model_type, config, size):
    import transformers

    processor, raw = getattr(transformers, processor)(**options), image(*size)
    pixels = processor(Image.open(io.BytesIO(raw)), return_tensors="pt").pixel_values[0]
    spec = spec_of(model_type, config, processor.to_dict())
    assert spec.input_size(*size) == tuple(pixels.shape[1:])
    assert torch.equal(ours(spec, raw, size, 1), patches_of(pixels, spec))


@pytest.mark.parametrize("size", [*SIZES, (64, 64)])
def test_dinov3_keeps_fractions_of_pixels(size, tmp_path):
    import transformers

    processor, raw = transformers.DINOv3ViTImageProcessor(size={"height": 64, "width": 64}), image(*size)
    pixels = processor(Image.open(io.BytesIO(raw)), return_tensors="pt").pixel_values[0]
    spec = spec_of("dinov3_vit", {"image_size": 64, "patch_size": 16}, processor.to_dict())
    torch.testing.assert_close(ours(spec, raw, size, 1), patches_of(pixels, spec), rtol=0, atol=1e-5)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(preprocessor_config(spec)))
    written = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    assert torch.equal(written(Image.open(io.BytesIO(raw)), return_tensors="pt").pixel_values[0], pixels)


@pytest.mark.parametrize("size", [*SIZES, (9, 700)])
def test_siglip2(size):
    import transformers

    processor, raw = transformers.Siglip2ImageProcessor(max_num_patches=50), image(*size)
    found = processor(Image.open(io.BytesIO(raw)), return_tensors="pt")
    spec = spec_of("siglip2_vision_model", {}, processor.to_dict())
    assert spec.grid(*size) == tuple(found.spatial_shapes[0].tolist())
    assert torch.equal(ours(spec, raw, size, 1), found.pixel_values[0, : spec.inner_tokens(*size)])


@pytest.mark.parametrize("size", [*SIZES, (20, 700), (6, 6)])
@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("qwen2_5_vl_vision", {}),
        ("qwen3_vl_vision", {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}),
    ],
)
def test_qwen(model_type, options, size):
    import transformers

    processor = transformers.Qwen2VLImageProcessor(min_pixels=4000, max_pixels=40000, **options)
    raw = image(*size)
    found = processor(Image.open(io.BytesIO(raw)), return_tensors="pt")
    spec = spec_of(model_type, {}, processor.to_dict())
    rows, columns = spec.grid(*size, merge=2)
    assert [1, rows, columns] == found.image_grid_thw[0].tolist()
    # Theirs are in the order of squares of four.
    squares = ours(spec, raw, size, 2).view(rows // 2, 2, columns // 2, 2, -1).transpose(1, 2).flatten(0, 3)
    assert torch.equal(squares, found.pixel_values)


@pytest.mark.parametrize(
    ("size", "said"), [((20, 1500), "28 x 1708, and encoder.max_pixels is 40000"), ((2, 500), "200 times longer")]
)
def test_qwen_refuses_what_has_more_tokens_than_the_most(size, said):
    spec = FAMILIES["qwen_vit"].spec(min_pixels=4000, max_pixels=40000)
    with pytest.raises(EncoderError, match=said):
        spec.num_tokens(*size, merge=2)


@pytest.mark.parametrize(
    ("model_type", "config", "preprocessor", "said"),
    [
        ("clip_vision_model", CLIP | {"image_size": 70}, CROP, "56 x 56 pixels, and config.json has image_size 70"),
        ("clip_vision_model", CLIP, {**CROP, "do_center_crop": False}, "do_center_crop"),
        ("clip_vision_model", CLIP, {**CROP, "resample": 0}, "resample is 0"),
        ("clip_vision_model", CLIP | {"hidden_act": "mish"}, CROP, "hidden_act is 'mish'"),
        ("clip", {"vision_config": CLIP | {"num_channels": 4}}, CROP, "num_channels is 4"),
        ("siglip2", {"vision_config": {"num_patches": 200}}, {}, "num_patches is 200"),
        ("dinov3_vit", {"key_bias": True}, {}, "key_bias is True"),
        ("qwen2_5_vl", {"vision_config": {"temporal_patch_size": 1}}, {}, "temporal_patch_size is 1"),
        ("whisper", {}, {"sampling_rate": 8000}, "sampling_rate is 8000"),
    ],
)
def test_what_cannot_be_built_is_refused(model_type, config, preprocessor, said):
    with pytest.raises(EncoderError, match=said):
        spec_of(model_type, config, preprocessor)


PLAIN = {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
SIDE_384 = {"size": {"height": 384, "width": 384}}


@pytest.mark.parametrize(
    ("processor", "options", "model_type", "config", "size", "most", "mean"),
    [
        ("CLIPImageProcessorPil", {}, "clip", {}, (480, 640), 2, 0.01),
        ("SiglipImageProcessorPil", SIDE_384, "siglip", {"image_size": 384}, (480, 640), 2, 0.01),
        ("SiglipImageProcessorPil", SIDE_384, "siglip", {"image_size": 384}, (768, 512), 12, 0.6),
        ("Qwen2VLImageProcessorPil", {}, "qwen2_5_vl_vision", {}, (768, 512), 2, 0.01),
        ("Qwen2VLImageProcessorPil", {}, "qwen2_5_vl_vision", {}, (480, 640), 24, 0.8),
    ],
)
def test_the_difference_to_pillow_is_what_the_docs_say(processor, options, model_type, config, size, most, mean):
    """Of an image of noise, in steps of 1/255: docs/pretrained.md."""
    import transformers

    processor, raw = getattr(transformers, processor)(**options, **PLAIN), noise(*size)
    found = processor(Image.open(io.BytesIO(raw)), return_tensors="pt")
    spec = spec_of(model_type, config, processor.to_dict())
    if model_type == "qwen2_5_vl_vision":
        rows, columns = (side // 2 for side in spec.grid(*size, merge=2))
        own = ours(spec, raw, size, 2).view(rows, 2, columns, 2, -1).transpose(1, 2).flatten(0, 3)
        difference = (own - found.pixel_values).abs() * 255
    else:
        difference = (ours(spec, raw, size, 1) - patches_of(found.pixel_values[0], spec)).abs() * 255
    # Equal images would be no proof that the two were compared.
    assert 0.5 < difference.max() < most + 0.5
    assert 1e-4 < difference.mean() < mean


def noise(height: int, width: int) -> bytes:
    """A PNG file in which pixels have nothing to do with each other."""
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()
