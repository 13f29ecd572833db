"""What a run is exported as, without weights: by whose names, or why not as one model."""

import json

import pytest

from data.tokens import build_tokenizer
from mimo_train.checkpoint.hf.documents import separate
from mimo_train.checkpoint.hf.joined import NoLlava, llava
from mimo_train.config.compose import load
from mimo_train.plan.inputs import placeholders_of
from mimo_train.plan.parameters import embedding_rows
from mimo_train.plan.run import resolve
from tests.unit.config.test_pretrained_llava import TOWER


def composed(*overrides: str) -> tuple:
    cfg = resolve(load("vlm_digits", ["data.sequence_length=1024", *overrides])).cfg
    tokenizer = build_tokenizer("bytes", placeholders_of(cfg).values())
    return cfg, tokenizer, embedding_rows(cfg.llm, tokenizer.vocab_size)


def test_joined_encoders_leave_by_our_names():
    """transformers has no class for two in one."""
    run = composed("encoder@modules.images.encoder=clip_dinov2")
    with pytest.raises(NoLlava, match="modules.images.encoder.family is joined, and towers of clip, siglip, vit are"):
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
    with pytest.raises(NoLlava, match="family gemma2 scales the features of pictures in LLaVA, and here it does not"):
        llava(*composed(f"modules.language.pretrained={tmp_path}", "data.tokenizer=bytes"))
    with pytest.raises(NoLlava, match="transformers has no such language model: modules.language.llm"):
        llava(*composed("modules.language.llm.attention_softcap=50", "modules.language.llm.scale_embeddings=true"))
    assert llava(*composed()).config["text_config"]["model_type"] == "llama"


def test_a_tower_with_register_tokens_is_no_part_of_llava(tmp_path):
    """Nor one of DINOv2 without: it leaves by itself, as what it is."""
    for kind, more in (("dinov2", {}), ("dinov2_with_registers", {"num_register_tokens": 2})):
        sizes = {key: value for key, value in TOWER.items() if key != "intermediate_size"}
        (tmp_path / "config.json").write_text(json.dumps(sizes | {"model_type": kind} | more))
        (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        run = composed(f"modules.images.pretrained={tmp_path}")
        with pytest.raises(NoLlava, match="encoder.family is dinov2, and towers of clip, siglip, vit are written"):
            llava(*run)


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
