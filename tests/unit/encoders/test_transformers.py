"""Models of transformers as they are: what is read of a directory, and features equal to the model's own."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig

from encoders.errors import EncoderError
from encoders.plain.model import dropout_rates
from encoders.transformers.directory import KNOWN, tower_config
from encoders.transformers.model import AudioTower, VisionTower
from encoders.transformers.spec import TransformersAudioSpec, TransformersSpec
from mimo_train.hf.directory import plain_model

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
PIXELS = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7], "rescale_factor": 1 / 255}
BOUND = 1e-6
"""Of differences relative to the largest feature."""


def saved(folder: Path, model, **preprocessing) -> str:
    """The directory of a model whose every parameter is drawn anew."""
    torch.manual_seed(3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    if preprocessing:
        (folder / "preprocessor_config.json").write_text(json.dumps(preprocessing))
    return str(folder)


def clip(folder: Path) -> str:
    """A whole CLIP, of which the vision tower is used."""
    vision = SIZES | {"image_size": 32, "patch_size": 8}
    config = transformers.CLIPConfig(
        text_config=SIZES | {"vocab_size": 50, "eos_token_id": 1}, vision_config=vision, projection_dim=16
    )
    crop = {"do_center_crop": True, "crop_size": {"height": 32, "width": 32}, "size": {"shortest_edge": 40}}
    return saved(folder, transformers.CLIPModel(config), **PIXELS, **crop)


def dinov2(folder: Path, **sizes) -> str:
    small = {key: value for key, value in SIZES.items() if key != "intermediate_size"}
    config = transformers.Dinov2Config(**small, mlp_ratio=2, **{"image_size": 32, "patch_size": 8} | sizes)
    return saved(folder, transformers.Dinov2Model(config), **PIXELS, size={"height": 32, "width": 32})


def built(spec, tower):
    assert not spec.faults()
    module = tower(spec)
    module.load_weights()
    return module.eval()


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    assert found.shape == expected.shape
    return (found - expected).abs().max() <= BOUND * expected.abs().max()


@pytest.mark.parametrize("model_type", KNOWN)
def test_the_defaults_are_those_of_transformers(model_type):
    config = AutoConfig.for_model(model_type).to_dict()
    for key, value in KNOWN[model_type].defaults.items():
        if model_type.startswith("dino") and key == "intermediate_size" and key not in config:
            continue  # it has a ratio
        assert list(config[key]) == value if isinstance(value, list) else config[key] == value, key


@torch.no_grad()
def test_clip_gives_the_hidden_states_of_its_vision_tower(tmp_path):
    path = clip(tmp_path)
    own = transformers.CLIPModel.from_pretrained(path).vision_model.eval()
    pixels = torch.randn(2, 3, 32, 32)
    states = own(pixel_values=pixels, output_hidden_states=True)
    spec = TransformersSpec(path=path)
    assert (spec.num_tokens(5, 9), spec.hidden_size, spec.image_size, spec.pixel_mean) == (16, 32, 32, [0.1, 0.2, 0.3])
    assert close(built(spec, VisionTower)(pixels), states.last_hidden_state[:, 1:])
    llava = built(replace(spec, hidden_state=-2), VisionTower)
    assert close(llava(pixels), states.hidden_states[-2][:, 1:])
    assert any(name.startswith(("encoder.layers.1.", "vision_model.encoder.layers.1.")) for name in llava.unused)
    kept = replace(spec, keep_prefix=True)
    assert kept.num_tokens(5, 9) == 17 and kept.joint_faults(2)
    assert close(built(kept, VisionTower)(pixels), states.last_hidden_state)
    assert any("crops the middle" in note for note in spec.notes())


@torch.no_grad()
def test_dinov2_gives_its_hidden_states_also_at_another_size(tmp_path):
    path = dinov2(tmp_path)
    own = transformers.Dinov2Model.from_pretrained(path).eval()
    for size, tokens in ((32, 16), (48, 36)):
        spec, pixels = TransformersSpec(path=path, image_size=size), torch.randn(2, 3, size, size)
        assert spec.num_tokens(1, 1, merge=2) == tokens // 4
        tower = built(spec, VisionTower)
        assert close(tower(pixels), own(pixel_values=pixels).last_hidden_state[:, 1:])
    assert tower.unused == {"embeddings.mask_token"}
    counted = sum(parameter.numel() for parameter in tower.parameters())
    assert abs(spec.num_parameters() - counted) < 0.1 * counted


@torch.no_grad()
def test_audio_models_give_their_hidden_states(tmp_path):
    config = transformers.Wav2Vec2Config(
        **SIZES, conv_dim=[16, 16], conv_kernel=[10, 3], conv_stride=[5, 2], num_feat_extract_layers=2,
        num_conv_pos_embedding_groups=2, num_conv_pos_embeddings=8,
    )  # fmt: skip
    path = saved(tmp_path / "waves", transformers.Wav2Vec2Model(config), do_normalize=True, sampling_rate=8000)
    spec = TransformersAudioSpec(path=path, dropout=0.0)
    length, rate = spec.input_size(787, 8000, merge=4)
    assert rate == 8000 and spec.tokens(length) % 4 == 0 and spec.tokens(length - 1) < spec.tokens(length)
    waves = torch.rand(2, length)
    own = transformers.Wav2Vec2Model.from_pretrained(path).eval()
    extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=True, sampling_rate=8000)
    values = extractor([wave.numpy() for wave in waves], sampling_rate=8000, return_tensors="pt").input_values
    found, expected = built(spec, AudioTower)(waves), own(values).last_hidden_state
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max() and found.shape[1] == spec.tokens(length)
    assert TransformersAudioSpec(path=path).dropout == pytest.approx(0.1)

    sizes = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48}
    decoder = {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 32, "vocab_size": 60}
    tokens = {"pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 1}
    whisper = transformers.WhisperConfig(**sizes, **decoder, **tokens, num_mel_bins=16, max_source_positions=100)
    path = saved(tmp_path / "whisper", transformers.WhisperModel(whisper), sampling_rate=16000)
    spec = TransformersAudioSpec(path=path, max_seconds=2.0)
    assert spec.input_size(9000, 16000) == (32000, 16000) and spec.most_tokens(4) == 25 and spec.joint_faults(3)
    waves = torch.nn.functional.pad(torch.rand(1, 9000), (0, 23000))
    extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=2)
    mels = extractor(waves[0].numpy(), sampling_rate=16000, return_tensors="pt").input_features
    expected = transformers.WhisperModel.from_pretrained(path).eval().get_encoder()(mels).last_hidden_state
    found = built(spec, AudioTower)(waves)
    assert found.shape == expected.shape and (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_dropout_is_read_and_switched_off(tmp_path):
    path = dinov2(tmp_path, hidden_dropout_prob=0.25)
    assert TransformersSpec(path=path).dropout == 0.25
    tower = VisionTower(TransformersSpec(path=path, dropout=0.0))
    assert not [name for name, rate in dropout_rates(tower) if rate]
    assert [field for field, _ in TransformersSpec(path=path, dropout=0.5).faults()] == ["dropout"]


def test_wrong_weights_are_named_with_both_shapes(tmp_path):
    path = dinov2(tmp_path)
    from safetensors.torch import load_file, save_file

    whole = load_file(tmp_path / "model.safetensors")
    for change, said in (
        (lambda tensors: tensors.pop("layernorm.bias"), "layernorm.bias is missing"),
        (lambda tensors: tensors.update({"layernorm.bias": torch.zeros(7)}), r"layernorm.bias: .*7.* here"),
    ):
        tensors = dict(whole)
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(EncoderError, match=said):
            VisionTower(TransformersSpec(path=path)).load_weights()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(EncoderError, match="encoder.path: .*weights=random"):
        VisionTower(TransformersSpec(path=path)).load_weights()
    VisionTower(TransformersSpec(path=path, weights="random")).load_weights()


@pytest.mark.parametrize(
    ("given", "interpolation"),
    [
        ({"resample": 2}, "bilinear"),
        ({"resample": 3}, "bicubic"),
        ({"image_processor_type": "ViTImageProcessor"}, "bilinear"),
        ({}, "bicubic"),
    ],
)
def test_images_are_resized_as_the_directory_says(tmp_path, given, interpolation):
    config = transformers.ViTConfig(**SIZES, image_size=32, patch_size=8)
    path = saved(tmp_path, transformers.ViTModel(config), **PIXELS, size={"height": 32, "width": 32}, **given)
    spec = TransformersSpec(path=path)
    assert not spec.faults() and spec.transform.interpolation == interpolation
    assert TransformersSpec(path=path, interpolation="bilinear").transform.interpolation == "bilinear"


def test_resized_pixels_of_dinov3_are_not_rounded(tmp_path):
    config = transformers.DINOv3ViTConfig(**SIZES, image_size=32, patch_size=8)
    path = saved(tmp_path, transformers.DINOv3ViTModel(config), **PIXELS, size={"height": 32, "width": 32}, resample=2)
    spec = TransformersSpec(path=path)
    assert not spec.transform.rounded
    assert plain_model("images", spec).preprocessor["image_processor_type"] == "DINOv3ViTImageProcessorFast"
    assert TransformersSpec(path=dinov2(tmp_path / "other")).transform.rounded


def test_another_way_to_resize_is_a_fault(tmp_path):
    config = transformers.ViTConfig(**SIZES, image_size=32, patch_size=8)
    path = saved(tmp_path, transformers.ViTModel(config), **PIXELS, size={"height": 32, "width": 32}, resample=1)
    ((field, sentence),) = TransformersSpec(path=path).faults()
    assert field == "interpolation" and "has another resample: set bilinear or bicubic" in sentence
    assert not TransformersSpec(path=path, interpolation="bicubic").faults()


@pytest.mark.parametrize(
    ("keys", "fields"),
    [
        ({"path": ""}, ["path"]),
        ({"path": "/nowhere"}, ["path"]),
        ({"weights": "maybe"}, ["weights"]),
        ({"hidden_state": -4}, ["hidden_state"]),
        ({"image_size": 33}, ["image_size"]),
        ({"tokens": 4, "patch_size": 16}, ["tokens"]),
        ({"model_config": {"model_type": "dinov2", "hidden_size": 7}}, ["path"]),
        ({"path": "", "model_config": {"model_type": "dinov2", "num_hidden_layers": "two"}}, ["model_config"]),
        ({"path": "", "model_config": {"model_type": "dinov2", "patch_size": -14}}, ["model_config"]),
        ({"path": "", "model_config": {"model_type": "dinov2", "mlp_ratio": math.inf}}, ["model_config"]),
    ],
)
def test_wrong_keys_are_faults(tmp_path, keys, fields):
    spec = TransformersSpec(**{"path": dinov2(tmp_path)} | keys)
    assert [field for field, _ in spec.faults()] == fields


def test_convolutions_that_do_not_fit_are_faults():
    for lists in ({"conv_kernel": [10]}, {"conv_stride": None}, {"conv_stride": [5, 0]}, {"conv_dim": 16}):
        config = {"conv_dim": [16, 16], "conv_kernel": [10, 3], "conv_stride": [5, 2]} | lists
        spec = TransformersAudioSpec(model_config={"model_type": "wav2vec2", **config}, weights="random")
        assert [field for field, _ in spec.faults()] == ["model_config"], lists


def test_what_is_not_known_by_formula_is_asked_for_by_key(tmp_path):
    config = transformers.ConvNextConfig(hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], image_size=64)
    path = saved(tmp_path, transformers.ConvNextModel(config))
    unknown = {field for field, _ in TransformersSpec(path=path, hidden_size=16).faults()}
    assert unknown == {"pixel_scale", "pixel_mean", "pixel_std", "patch_size", "prefix_tokens"}
    pixels = {"pixel_scale": 1.0, "pixel_mean": [0.0] * 3, "pixel_std": [1.0] * 3}
    spec = TransformersSpec(path=path, hidden_size=16, image_size=64, patch_size=32, prefix_tokens=0, **pixels)
    assert built(spec, VisionTower)(torch.randn(1, 3, 64, 64)).shape == (1, spec.num_tokens(9, 9), 16)
    assert [field for field, _ in TransformersAudioSpec(path=path).faults()] == ["hidden_size"]


def test_a_run_without_the_directory_has_its_config(tmp_path):
    spec = TransformersSpec(path=dinov2(tmp_path))
    later = replace(spec, path="/gone")
    assert not later.faults() and later.model_config == tower_config(spec.path, "vision_config")


class Hostile:
    """What a pickle of this runs."""

    def __init__(self, ran: Path):
        self.ran = str(ran)

    def __reduce__(self):
        return open, (self.ran, "w")


def test_no_code_of_a_directory_is_run(tmp_path, monkeypatch):
    """Neither a class that its config names, nor a pickle in the place of its weights: the first is left aside, the
    second is an error."""
    ran, path = tmp_path / "ran", Path(dinov2(tmp_path / "model"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    own = "from transformers import Dinov2Config, Dinov2Model\nclass Own(Dinov2Config): pass\n"
    (path / "own.py").write_text(f"{own}class M(Dinov2Model): pass\nopen({str(ran)!r}, 'w').close()\n")
    config = json.loads((path / "config.json").read_text())
    named = {"auto_map": {"AutoConfig": "own.Own", "AutoModel": "own.M"}, "architectures": ["M"]}
    (path / "config.json").write_text(json.dumps(config | named))
    AutoConfig.from_pretrained(path, trust_remote_code=True)
    assert ran.exists()  # a load that trusts it runs it
    ran.unlink()
    built(TransformersSpec(path=str(path)), VisionTower)
    assert not ran.exists()

    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    torch.save(tensors, path / "pytorch_model.bin")
    built(TransformersSpec(path=str(path)), VisionTower)
    torch.save(Hostile(ran), path / "pytorch_model.bin")
    torch.load(path / "pytorch_model.bin", weights_only=False).close()
    assert ran.exists()
    ran.unlink()
    with pytest.raises(
        EncoderError, match=r"encoder\.path: transformers cannot load .*give a directory with safetensors"
    ):
        built(TransformersSpec(path=str(path)), VisionTower)
    (path / "pytorch_model.bin").rename(path / "model.safetensors")
    with pytest.raises(EncoderError, match=r"encoder\.path: transformers cannot load"):
        built(TransformersSpec(path=str(path)), VisionTower)
    assert not ran.exists()
