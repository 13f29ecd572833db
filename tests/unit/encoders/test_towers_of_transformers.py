"""Encoders of transformers as they are: what is read of a directory, and features equal to the model's own."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from encoders.errors import EncoderError
from encoders.plain.model import dropout_rates
from encoders.transformers_media.tower import Tower, TowerEncoder
from encoders.transformers_media.tower_reader import tensors_of_tower, tower_keys
from encoders.transformers_media.tower_spec import TowerAudio, TowerImages
from mimo_train.config.pretrained.composites.of_transformers import stored_weights

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
PATCHES = {"image_size": 32, "patch_size": 8}
PIXELS = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7], "rescale_factor": 1 / 255}
SQUARE = {"size": {"height": 32, "width": 32}, "do_center_crop": False}
CROP = {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}, "do_center_crop": True}
DINO = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 2, **PATCHES}
WAVES = {
    "conv_dim": [16, 16], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_feat_extract_layers": 2,
    "num_conv_pos_embedding_groups": 2, "num_conv_pos_embeddings": 8,
}  # fmt: skip
WHISPER = {
    "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_layers": 1,
    "decoder_attention_heads": 2, "decoder_ffn_dim": 32, "vocab_size": 60, "pad_token_id": 1, "bos_token_id": 1,
    "eos_token_id": 1, "decoder_start_token_id": 1, "num_mel_bins": 16, "max_source_positions": 100,
}  # fmt: skip
CLIP = {
    "text_config": SIZES | {"vocab_size": 50, "eos_token_id": 1}, "vision_config": SIZES | PATCHES, "projection_dim": 16
}  # fmt: skip
IMAGE, BOUND = (3, 50, 40), 1e-5
MODELS = {
    "CLIP": (CLIP, "CLIPImageProcessor", CROP),
    "Dinov2": (DINO | {"hidden_dropout_prob": 0.25}, "BitImageProcessor", SQUARE),
    "DINOv3ViT": (SIZES | PATCHES | {"num_register_tokens": 3}, "DINOv3ViTImageProcessor", SQUARE),
    "Siglip": (CLIP, "SiglipImageProcessor", SQUARE),
    "ConvNext": (
        {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "image_size": 64},
        "ConvNextImageProcessor", {"size": {"shortest_edge": 64}, "crop_pct": 1.0},
    ),
    "Swin": (
        {"image_size": 64, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 1], "window_size": 4},
        "ViTImageProcessor", {"size": {"height": 64, "width": 64}},
    ),
    "Wav2Vec2": (SIZES | WAVES, "Wav2Vec2FeatureExtractor", {"do_normalize": True, "sampling_rate": 8000}),
    "Whisper": (
        WHISPER, "WhisperFeatureExtractor", {"feature_size": 16, "chunk_length": 2, "sampling_rate": 16000},
    ),
}  # fmt: skip
"""Keys of the config, class of the processor, its keys."""


def saved(folder: Path, kind: str, **sizes) -> str:
    """Return the directory of a model whose every parameter is drawn anew."""
    config, processor, keys = MODELS[kind]
    model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**config | sizes))
    torch.manual_seed(3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    name = "feature_extractor_type" if processor.endswith("Extractor") else "image_processor_type"
    pixels = PIXELS if name.startswith("image") else {}
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels | {name: processor} | keys))
    return str(folder)


def spec_of(folder: str, **keys):
    values = tower_keys(folder)
    return (TowerImages if values["family"] == "tower_images" else TowerAudio)(**values | keys)


@torch.no_grad()
def features(spec, item: torch.Tensor) -> torch.Tensor:
    """Return the features of an item with the weights of the directory."""
    assert not spec.faults()
    tower, files = Tower(spec), load_file(Path(spec.path) / "model.safetensors")
    stored = tensors_of_tower(spec.path).stored_names(files)
    for name, parameter in tower.model.named_parameters():
        parameter.copy_(files[stored[name]])
    rows = tower.eval()([spec.processor().read(item)])
    extent = item.shape[1:] if item.dim() == 3 else (len(item), spec.processor().sample_rate)
    assert len(rows) == spec.output_tokens(*extent)
    return rows


@torch.no_grad()
def expected(path: str, kind: str, item: torch.Tensor, state: int | None = None, **options) -> torch.Tensor:
    """Return all states of an item by transformers alone, [T, H]."""
    model = getattr(transformers, f"{kind}Model").from_pretrained(path).eval()
    if item.dim() == 3:
        processor = transformers.AutoImageProcessor.from_pretrained(path)
        inputs = processor(images=[item], return_tensors="pt", **options)
    else:
        processor = transformers.AutoFeatureExtractor.from_pretrained(path)
        inputs = processor(item.numpy(), sampling_rate=processor.sampling_rate, return_tensors="pt")
    model = model.get_encoder() if kind == "Whisper" else getattr(model, "vision_model", model)
    output = model(inputs[model.main_input_name], output_hidden_states=True)
    states = output.last_hidden_state if state is None else output.hidden_states[state]
    return states.flatten(2).mT[0] if states.dim() == 4 else states[0]


def close(actual: torch.Tensor, reference: torch.Tensor) -> bool:
    assert actual.shape == reference.shape
    return bool((actual - reference).abs().max() <= BOUND * reference.abs().max())


@pytest.mark.parametrize("kind", MODELS)
def test_features_are_those_of_the_model_and_its_processor(kind, tmp_path):
    path = saved(tmp_path, kind)
    spec = spec_of(path, **{"Swin": {"prefix_tokens": 0}, "Whisper": {"max_seconds": 2}}.get(kind, {}))
    torch.manual_seed(1)
    item = torch.randint(0, 256, IMAGE, dtype=torch.uint8) if spec.kind == "image" else torch.rand(787)
    reference = expected(path, kind, item)
    assert close(features(spec, item), reference[spec.dropped_tokens :])
    counted = sum(parameter.numel() for parameter in Tower(spec).parameters())
    assert spec.num_parameters() == counted
    assert stored_weights(spec.tensors(), Path(path), "key").rules


def test_a_hidden_state_with_the_class_token_and_another_size(tmp_path):
    image = torch.randint(0, 256, IMAGE, dtype=torch.uint8)
    path = saved(tmp_path / "clip", "CLIP")
    spec = spec_of(path, hidden_state=-2, keep_prefix=True)
    assert (spec.num_tokens(5, 9), spec.sizes_vary) == (17, False) and spec.joint_faults(2)
    assert close(features(spec, image), expected(path, "CLIP", image, -2))
    frozen = [name for name, parameter in Tower(spec).named_parameters() if not parameter.requires_grad]
    assert any("layers.1." in name for name in frozen) and not any("layers.0." in name for name in frozen)
    path = saved(tmp_path / "dino", "Dinov2")
    spec = spec_of(path, image_size=48, dropout=0.0)
    assert spec.num_tokens(1, 1, merge=2) == 9 and spec.token_grid(1, 1, merge=2) == (3, 3)
    larger = expected(path, "Dinov2", image, size={"height": 48, "width": 48})
    assert close(features(spec, image), larger[1:])
    assert spec_of(path).dropout == 0.25 and not [rate for _, rate in dropout_rates(Tower(spec)) if rate]


def test_features_are_joined(tmp_path):
    encoder = TowerEncoder.__new__(TowerEncoder)
    torch.nn.Module.__init__(encoder)
    encoder.merge, encoder.spec = 4, spec_of(saved(tmp_path, "Wav2Vec2"))
    joined = encoder._joined(torch.ones(6, 32), {"grid": None})
    assert joined.shape == (2, 128) and joined.sum() == 6 * 32 and encoder.spec.num_tokens(77, 8000, merge=4) == 2
    assert encoder.spec.output_tokens(77, 8000) == 6


@pytest.mark.parametrize(
    ("kind", "keys", "field"),
    [
        ("CLIP", {"path": ""}, "path"),
        ("CLIP", {"path": "/nowhere"}, "path"),
        ("CLIP", {"hidden_state": -4}, "hidden_state"),
        ("ConvNext", {"hidden_state": 0}, "hidden_state"),
        ("Swin", {}, "prefix_tokens"),
        ("Dinov2", {"dropout": 0.5}, "dropout"),
        ("Whisper", {"max_seconds": 3.0}, "max_seconds"),
    ],
)
def test_wrong_keys_are_faults(tmp_path, kind, keys, field):
    assert [name for name, _ in spec_of(saved(tmp_path, kind), **keys).faults()] == [field]


def test_a_directory_without_an_encoder_is_named(tmp_path):
    config = transformers.BertConfig(**SIZES, vocab_size=20)
    transformers.BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(EncoderError, match="^BertModel takes .* not images or audio alone"):
        tower_keys(str(tmp_path))
    path = saved(tmp_path / "dino", "Dinov2")
    (Path(path) / "preprocessor_config.json").unlink()
    with pytest.raises(EncoderError, match="^cannot load the ImageProcessor of "):
        tower_keys(path)


def test_no_code_of_a_directory_is_run(tmp_path):
    ran, path = tmp_path / "ran", Path(saved(tmp_path / "model", "Dinov2"))
    text = "from transformers import Dinov2Config, Dinov2Model\nclass Own(Dinov2Config): pass\n"
    (path / "own.py").write_text(f"{text}class M(Dinov2Model): pass\nopen({str(ran)!r}, 'w').close()\n")
    config = json.loads((path / "config.json").read_text())
    named = {"auto_map": {"AutoConfig": "own.Own", "AutoModel": "own.M"}, "architectures": ["M"]}
    (path / "config.json").write_text(json.dumps(config | named))
    assert not replace(spec_of(str(path)), hidden_state=1).faults() and not ran.exists()
