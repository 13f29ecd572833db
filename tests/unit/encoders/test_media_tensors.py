"""Rows of directories that make up the parameters of a model of several parts, and what of it a half holds."""

import pytest
import torch
from transformers import AutoModelForMultimodalLM, LlavaNextConfig, LlavaNextForConditionalGeneration

from encoders.transformers_media.directory import hub_state, saved_buffers, scales_logits, without_media
from encoders.transformers_media.model import media_half, read_buffers
from encoders.transformers_media.tensors import Structure
from tests.dist.all_types.configs import shrink, tiny_config


@pytest.mark.parametrize(
    ("kind", "special"),
    [
        ("dots3_note", ".mlp.e_score_correction_bias"),
        ("qianfan_ocr", ".attention.q_proj.weight"),
    ],
)
def test_tensors_that_a_class_converts_and_buffers_with_weights_are_read(kind, special):
    config = tiny_config(kind)
    with torch.device("meta"):
        model = AutoModelForMultimodalLM.from_config(config)
    structure = Structure(config)
    assert any(name.endswith(special) for name in structure.shapes), sorted(structure.shapes)
    values = {name: torch.randn(shape) for name, shape in structure.shapes.items()}
    stored = hub_state(model, values, None)
    rules = structure.rules({name: tuple(value.shape) for name, value in stored.items()})
    assert {rule.ours for rule in rules} == structure.shapes.keys()
    for rule in rules:
        read = torch.cat([stored[rows.name][rows.first : rows.first + rows.count] for rows in rule.rows])
        assert torch.equal(read.view_as(values[rule.ours]), values[rule.ours]), rule.ours


def test_a_language_model_has_no_parameters_of_images():
    config = LlavaNextConfig.from_dict(shrink(LlavaNextConfig().to_dict()))
    with torch.device("meta"):
        model = without_media(LlavaNextForConditionalGeneration(config))
    assert not [name for name, _ in model.named_parameters() if "language_model" not in name and "lm_head" not in name]


@pytest.mark.parametrize(("kind", "scales"), [("cohere2_vision", False), ("aya_vision", False), ("llava", True)])
def test_a_model_may_not_scale_logits_as_its_language_model_does(kind, scales):
    assert scales_logits(tiny_config(kind)) == scales


def test_buffers_are_read_from_any_kind_of_weight_file(tmp_path):
    model = AutoModelForMultimodalLM.from_config(tiny_config("gemma4"))
    bounds = {name: torch.rand(()) for name in saved_buffers(model) if name.endswith("input_min")}
    model.load_state_dict(bounds, strict=False)
    (tmp_path / "safetensors").mkdir()
    (tmp_path / "bin").mkdir()
    model.save_pretrained(tmp_path / "safetensors")
    model.config.save_pretrained(tmp_path / "bin")
    torch.save(model.state_dict(), tmp_path / "bin/pytorch_model.bin")
    for folder in ("safetensors", "bin"):
        half = media_half(model.config, "image")
        read_buffers(half, str(tmp_path / folder))
        read = {name: value for name, value in half.state_dict().items() if name in bounds}
        assert read and all(torch.equal(value, bounds[name]) for name, value in read.items())
