"""Rows of directories that make up the parameters of a model of several parts, and what of it a half holds."""

import torch
from transformers import Dots3NoteForConditionalGeneration, LlavaNextConfig, LlavaNextForConditionalGeneration

from encoders.transformers_media.directory import hub_state, without_media
from encoders.transformers_media.tensors import Structure
from tests.dist.all_types.configs import shrink, tiny_config


def test_matrices_that_a_class_stacks_and_buffers_with_weights_are_read():
    config = tiny_config("dots3_note")
    with torch.device("meta"):
        model = Dots3NoteForConditionalGeneration(config)
    structure = Structure(config)
    router = "model.vision_tower.blocks.1.mlp.e_score_correction_bias"
    assert router in structure.shapes and router in dict(model.named_buffers())
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
