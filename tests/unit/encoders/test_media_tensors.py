"""Rows of directories that make up the parameters of a model of several parts, and what of it a half holds."""

import pytest
import torch
from transformers import AutoModelForMultimodalLM, LlavaNextConfig, LlavaNextForConditionalGeneration

from encoders.transformers_media.directory import hub_state, scales_logits, without_media
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
