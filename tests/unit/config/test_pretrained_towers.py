"""config.json of towers as on the hub: its keys, the resulting sizes, and the preprocessing."""

import dataclasses
import json

import pytest

from encoders.registry import FAMILIES
from mimo_train.config.compose import load
from mimo_train.config.errors import ConfigError
from mimo_train.config.pretrained.fill_in import CHOICES
from mimo_train.layout.run import resolve

IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
HALVES = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
CROP = {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}, "do_center_crop": True}
OPEN_CLIP = {
    "architectures": ["CLIPModel"],
    "initializer_factor": 1.0,
    "logit_scale_init_value": 2.6592,
    "model_type": "clip",
    "projection_dim": 1024,
    "text_config": {"hidden_act": "gelu", "hidden_size": 1024, "model_type": "clip_text_model"},
    "text_config_dict": None,
    "vision_config_dict": None,
}
"""Models that were trained with open_clip and converted."""

TOWERS = {
    "LAION's CLIP B/32": (
        OPEN_CLIP | {"vision_config": {"model_type": "clip_vision_model", "hidden_act": "gelu", "dropout": 0.0}},
        CROP,
        ("clip", "gelu", 49, 87.5),
    ),
    "LAION's CLIP H/14": (
        OPEN_CLIP
        | {
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_act": "gelu",
                "hidden_size": 1280,
                "intermediate_size": 5120,
                "num_attention_heads": 16,
                "num_hidden_layers": 32,
                "patch_size": 14,
                "torch_dtype": "float32",
            }
        },
        # As old versions wrote it.
        {"size": 224, "crop_size": 224, "do_center_crop": True, "do_resize": True, "resample": 3},
        ("clip", "gelu", 256, 630.8),
    ),
    "SigLIP 2 of one size": (
        {
            "architectures": ["SiglipModel"],
            "model_type": "siglip",
            "text_config": {"model_type": "siglip_text_model", "vocab_size": 256000},
            "vision_config": {"model_type": "siglip_vision_model", "image_size": 256},
        },
        HALVES | {"size": {"height": 256, "width": 256}, "resample": 2},
        ("siglip", "gelu_tanh", 256, 85.8),
    ),
    "SigLIP 2 NaFlex": (
        {
            "architectures": ["Siglip2Model"],
            "model_type": "siglip2",
            "text_config": {"model_type": "siglip2_text_model", "vocab_size": 256000},
            "vision_config": {"model_type": "siglip2_vision_model", "num_patches": 256},
        },
        HALVES | {"patch_size": 16, "max_num_patches": 256, "resample": 2},
        ("siglip2", "gelu_tanh", 256, 85.8),
    ),
    "DINOv2 with registers": (
        {
            "architectures": ["Dinov2WithRegistersModel"],
            "model_type": "dinov2_with_registers",
            "patch_size": 14,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "num_register_tokens": 4,
            "image_size": 518,
            "layerscale_value": 1.0,
            "interpolate_antialias": True,
            "use_swiglu_ffn": False,
        },
        IMAGENET | {**CROP, "size": {"shortest_edge": 256}},
        ("dinov2", "gelu", 256, 304.4),
    ),
    "DINOv3": (
        {
            "architectures": ["DINOv3ViTModel"],
            "model_type": "dinov3_vit",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "num_register_tokens": 4,
            "pos_embed_jitter": None,
            "pos_embed_rescale": 2.0,
        },
        IMAGENET | {"size": {"height": 224, "width": 224}, "resample": 2},
        ("dinov3", "gelu", 196, 303.1),
    ),
}


@pytest.mark.parametrize("name", TOWERS)
def test_sizes_and_tokens(name, tmp_path):
    config, preprocessor, (family, activation, tokens, millions) = TOWERS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    cfg = load("vlm_digits", [f"modules.images.pretrained={tmp_path}", "data.sequence_length=1024"])
    encoder = resolve(cfg).cfg.modules["images"].encoder
    assert (encoder.family, encoder.activation) == (family, activation)
    assert encoder.num_tokens(300, 300) == tokens
    assert encoder.num_parameters() / 1e6 == pytest.approx(millions, abs=0.9)
    assert encoder.interpolation == ("bilinear" if preprocessor.get("resample") == 2 else "bicubic")
    assert encoder.pixel_mean == preprocessor.get("image_mean", [0.48145466, 0.4578275, 0.40821073])


OPEN = {"feature_layer", "final_norm", "keep_class_token", "grid_pinpoints", "max_tiles", "cut_several", "image_size"}
OPEN |= {"path", "pad"}
"""Besides `CHOICES`: keys of the tower's features and of tiling, and those that a whole directory has for videos.
`image_size` is a choice of some families; another test covers the rest."""
OTHER = {"normalization": "RMSNorm", "activation": "relu", "swiglu": "relu", "family": "vit", "position": "none"}


@pytest.mark.parametrize("kind", [*TOWERS, "whisper", "qwen2_audio_encoder", "qwen2_5_vl_vision", "qwen3_vl_vision"])
def test_keys_that_contradict_the_directory_are_faults_with_both_values(kind, tmp_path):
    """Covers all keys that weights depend on, in every family."""
    config, preprocessor, _ = TOWERS.get(kind, ({"model_type": kind}, {}, None))
    (tmp_path / "config.json").write_text(json.dumps(config))
    if preprocessor:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    family = next(one for one in FAMILIES.values() if config["model_type"] in one.readers)
    spec = family.spec(**family.read(config, preprocessor))
    given = {}
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if field.name in CHOICES["encoder"] | OPEN | {"family"} or (field.name, bool(preprocessor)) in UNKNOWN:
            continue
        if isinstance(value, (str, bool)):
            given[field.name] = not value if isinstance(value, bool) else OTHER[field.name]
        else:
            given[field.name] = [2] if isinstance(value, list) else value + 1
    name = "audio" if spec.kind == "audio" else "images"
    keys = [f"modules.{name}.encoder.{key}={value}" for key, value in given.items()]
    base = {"audio": "recipes/llama_whisper_clip", "images": "vlm_digits"}[name]
    with pytest.raises(ConfigError) as error:
        load(base, [f"modules.{name}.pretrained={tmp_path}", *keys])
    said = dict(line.split(": is ", 1) for line in str(error.value).splitlines())
    assert said.keys() == {f"modules.{name}.encoder.{key}" for key in given} and len(given) > 6
    for key, value in given.items():
        expected = f"{value!r}, and {tmp_path / 'config.json'} makes it {getattr(spec, key)!r}: remove the key"
        assert said[f"modules.{name}.encoder.{key}"].startswith(expected), key


UNKNOWN = {("pixel_mean", False), ("pixel_std", False)}
"""Keys that a directory without a preprocessor does not decide."""


def test_the_activation_of_clip_is_that_of_who_trained_it(tmp_path):
    """OpenAI's config.json has no activation, LAION's has another one; they are not confused."""
    for act, ours, other in (({}, "quick_gelu", "gelu"), ({"hidden_act": "gelu"}, "gelu", "quick_gelu")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip_vision_model", **act}))
        keys = [f"modules.images.pretrained={tmp_path}", "data.sequence_length=1024"]
        assert load("vlm_digits", keys).modules["images"].encoder.activation == ours
        with pytest.raises(ConfigError, match=f"encoder.activation: is '{other}', and .* makes it '{ours}'"):
            load("vlm_digits", [*keys, f"modules.images.encoder.activation={other}"])


def test_qwen2_audio(tmp_path):
    """Sizes that its config.json lacks are those of the 7B model's tower."""
    parts = {"audio_config": {"model_type": "qwen2_audio_encoder"}, "text_config": {"model_type": "qwen2"}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_audio", "audio_token_index": 7, **parts}))
    file = tmp_path / "run.yaml"
    file.write_text(
        "defaults: [data@data: text, optim@optim: adamw, _self_]\n"
        f"modules: {{audio: {{pretrained: {tmp_path}}}, language: {{pretrained: {tmp_path}}}}}\n"
    )
    run = resolve(load(str(file), ["data.sequence_length=1024", "data.tokenizer=bytes"])).cfg
    encoder, projector = run.modules["audio"].encoder, run.modules["audio"].projector
    assert (encoder.family, encoder.hidden_size, encoder.num_layers, encoder.num_mels) == ("qwen_audio", 1280, 32, 128)
    assert (encoder.max_seconds, encoder.padded_seconds, encoder.most_tokens()) == (30, 30, 750)
    assert (projector.kind, projector.bias, projector.norm, run.llm.qkv_bias) == ("linear", True, "", True)
    for key, value in (("bias", "false"), ("norm", "LayerNorm"), ("resampler.latents", "4")):
        with pytest.raises(ConfigError, match=rf"modules.audio.projector.{key.partition('.')[0]}: is .* makes it"):
            load(str(file), [f"modules.audio.projector.{key}={value}"])
