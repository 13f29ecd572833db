"""What a run is exported as, without weights: by whose names, or why not as one model."""

import json

import pytest

from data.text.tokens import build_tokenizer
from encoders.errors import EncoderError
from encoders.projectors.spec import ProjectorSpec
from encoders.registry import FAMILIES
from mimo_train.config.compose import load
from mimo_train.config.schema_modules import ModuleConfig
from mimo_train.estimate.parameters import embedding_rows
from mimo_train.hf.documents import separate
from mimo_train.hf.joined import NoLlava, llava
from mimo_train.hf.llava_limits import published_encoder, require_llava
from mimo_train.inputs.datasets import placeholders_of
from mimo_train.layout.run import resolve
from tests.unit.config.test_pretrained_llava import TOWER


def composed(*overrides: str) -> tuple:
    cfg = resolve(load("vlm_digits", ["data.sequence_length=1024", *overrides])).cfg
    tokenizer = build_tokenizer("bytes", placeholders_of(cfg).values())
    return cfg, tokenizer, embedding_rows(cfg.llm, tokenizer.vocab_size)


def test_joined_encoders_leave_by_our_names():
    """transformers has no class for two in one."""
    run = composed("encoder@modules.images.encoder=clip_dinov2")
    with pytest.raises(NoLlava, match="modules.images.encoder.family is joined, and towers of clip, siglip, vit"):
        llava(*run)
    documents = {one.name: one for one in separate(*run)}
    assert documents.keys() == {"images", "images.projector", "language"}
    (whole,) = documents["images"].whole
    assert (whole.module, whole.begins, documents["images"].is_plain) == ("images", "encoders.", True)
    assert documents["images"].config["mimo_train"]["first"]["family"] == "clip"
    assert "transformers has no class for it" in documents["images"].what


def test_gemma_2_is_no_part_of_llava(tmp_path):
    """From its directory, or with its options; other families are."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma2", "num_hidden_layers": 2}))
    with pytest.raises(NoLlava, match="family gemma2 scales the features of images in LLaVA, and here it does not"):
        llava(*composed(f"modules.language.pretrained={tmp_path}", "data.tokenizer=bytes"))
    with pytest.raises(NoLlava, match="transformers has no such language model: modules.language.llm"):
        llava(*composed("modules.language.llm.attention_softcap=50", "modules.language.llm.scale_embeddings=true"))
    assert llava(*composed()).config["text_config"]["model_type"] == "llama"


def test_a_tower_of_dinov2_is_part_of_llava_unless_it_has_register_tokens(tmp_path):
    for kind, more in (("dinov2", {}), ("dinov2_with_registers", {"num_register_tokens": 2})):
        sizes = {key: value for key, value in TOWER.items() if key != "intermediate_size"}
        (tmp_path / "config.json").write_text(json.dumps(sizes | {"model_type": kind} | more))
        cfg, _, _ = composed(f"modules.images.pretrained={tmp_path}", "modules.images.encoder.final_norm=false")
        if more:
            with pytest.raises(NoLlava, match="register_tokens is 2, and LLaVA would keep them in the sequence"):
                require_llava(cfg)
        else:
            require_llava(cfg)


WHISPER = {"sample_rate": 16000, "pad_clips": True, "key_bias": False}


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("dinov2", {"position_size": 98, "layer_scale": 0.5, "interpolation": "bilinear"}),
        (
            "dinov2",
            {"register_tokens": 2, "activation": "swiglu", "ffn_hidden_size": 2048},
        ),
        ("dinov3", {"rotary_base": 50.0, "register_tokens": 0, "resize": "crop", "shortest_edge": 256}),
        ("dinov3", {"activation": "swiglu"}),
        ("siglip2", {"max_patches": 100, "image_size": 128}),
        ("whisper", WHISPER | {"max_seconds": 12.0, "num_mels": 64, "activation": "relu"}),
    ],
)
def test_what_is_written_of_an_encoder_is_read_as_the_same(family, values):
    spec = FAMILIES[family].spec(**values)
    assert spec.faults() == []
    published = FAMILIES[family].published(spec)
    read = FAMILIES[family].read(published.config, published.preprocessor)
    defaults = {"shortest_edge": spec.image_size, "position_size": spec.image_size} if spec.kind == "image" else {}
    for name, value in read.items():
        assert value == (getattr(spec, name) or defaults.get(name, getattr(spec, name))), name


@pytest.mark.parametrize(
    ("family", "values", "merge", "words"),
    [
        ("whisper", {}, 1, "set key_bias=false, pad_clips=true$"),
        ("whisper", WHISPER | {"max_seconds": 2.5}, 1, "set max_seconds to whole seconds and whole frames of 320"),
        ("whisper", WHISPER, 7, "projector.merge is 7, and each clip is resized to a multiple of it"),
        ("siglip2", {}, 2, "projector.merge is 2, and each image is resized to a multiple of it"),
        ("dinov2", {"ffn_hidden_size": 3000}, 1, "is 3000, .* whole multiples of hidden_size 768 .* set .*=3072"),
        ("dinov3", {"resize": "native"}, 1, "resize is native, and transformers' class has images of one size"),
        ("qwen_audio", {}, 1, "transformers has no class for an encoder of family qwen_audio alone"),
    ],
)
def test_an_encoder_that_its_class_does_not_compute_says_why(family, values, merge, words):
    module = ModuleConfig(encoder=FAMILIES[family].spec(**values), projector=ProjectorSpec(merge=merge))
    with pytest.raises(EncoderError, match=words):
        published_encoder(module)


@pytest.mark.parametrize(
    ("keys", "model"),
    [
        (("kind=linear", "bias=false", "merge=2"), "Idefics3"),
        (("merge=2", "norm=LayerNorm"), "InternVL"),
        (("activation=swiglu", "bias=false", "resampler.latents=4"), "Idefics2"),
        (("merge=2",), ""),
        (("activation=swiglu", "bias=false", "resampler.latents=4", "resampler.normalization=LayerNorm"), ""),
        (("merge=2", "norm=LayerNorm", "ffn_hidden_size=24"), ""),
    ],
)
def test_projectors_leave_by_the_names_of_a_connector_that_computes_the_same(keys, model):
    grid = ("modules.images.encoder.image_size=32", "modules.images.encoder.patch_size=8")
    run = composed(*grid, *(f"modules.images.projector.{key}" for key in keys))
    (document,) = (one for one in separate(*run) if one.name == "images.projector")
    assert document.config["mimo_train"].get("connector", "") == model
    assert bool(document.parts) == bool(model) and bool(document.whole) != bool(model)
    if model:
        names = set(document.parts[0].weights.row_counts())
        assert all("encoder" not in name and "linear_fc" not in name for name in names), names
