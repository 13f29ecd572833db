"""The processor of an exported LLaVA has what it counts an image's tokens by, whoever saved the source."""

import json

import pytest

from mimo_train.hf.directory import copy_files

CLIP = {"model_type": "clip_vision_model", "patch_size": 14}
KEYS = {"processor_class": "LlavaProcessor", "patch_size": 14, "num_additional_image_tokens": 1}
KEYS |= {"vision_feature_select_strategy": "default"}


def copied(tmp_path, config, **files):
    source, to = tmp_path / "source", tmp_path / "to"
    for folder in (source, to):
        folder.mkdir()
    for name, content in {"config": config, **files}.items():
        (source / f"{name}.json").write_text(json.dumps(content))
    copy_files(source, to)
    return {path.stem: json.loads(path.read_text()) for path in to.iterdir()}


def test_what_older_versions_did_not_save_is_added(tmp_path):
    found = copied(tmp_path, {"model_type": "llava", "vision_config": CLIP}, preprocessor_config={"resample": 3})
    assert found == {"preprocessor_config": {"resample": 3}, "processor_config": KEYS}


@pytest.mark.parametrize(
    ("tower", "keys"),
    [
        ({"model_type": "siglip_vision_model"}, {"patch_size": 16, "num_additional_image_tokens": 0}),
        (None, {"patch_size": 14, "num_additional_image_tokens": 1}),
        ({"hidden_size": 8}, {"patch_size": 32, "num_additional_image_tokens": 1}),
    ],
)
def test_by_the_tower(tmp_path, tower, keys):
    config = {"model_type": "llava", "vision_config": tower, "vision_feature_select_strategy": "full"}
    found = copied(tmp_path, config, processor_config={"image_token": "<i>", "patch_size": None})["processor_config"]
    assert found == {**KEYS, **keys, "vision_feature_select_strategy": "full", "image_token": "<i>"}


def test_what_is_there_stays_as_it_is(tmp_path):
    own = KEYS | {"patch_size": 7, "num_additional_image_tokens": 0}
    config = {"model_type": "llava", "vision_config": CLIP}
    assert copied(tmp_path, config, processor_config=own)["processor_config"] == own


@pytest.mark.parametrize(
    ("saved", "written"),
    [
        ("CLIPImageProcessor", "CLIPImageProcessorFast"),
        ("CLIPImageProcessorFast", "CLIPImageProcessorFast"),
        ("CLIPImageProcessorPil", "CLIPImageProcessorPil"),
        ("MyImageProcessor", "MyImageProcessor"),
    ],
)
def test_an_image_processor_of_version_5_is_on_torchvision_in_version_4_too(tmp_path, saved, written):
    """In `preprocessor_config.json` the name is version 4's own, and stays."""
    files = {"processor_config": {"image_processor": {"image_processor_type": saved, "resample": 3}}}
    files |= {"preprocessor_config": {"image_processor_type": "CLIPImageProcessor"}}
    found = copied(tmp_path, {"model_type": "qwen2_5_vl"}, **files)
    assert found["processor_config"] == {"image_processor": {"image_processor_type": written, "resample": 3}}
    assert found["preprocessor_config"] == files["preprocessor_config"]


@pytest.mark.parametrize("config", [{"model_type": "llama"}, {"model_type": "llava"}])
def test_no_processor_is_made_up(tmp_path, config):
    assert copied(tmp_path, config, tokenizer_config={}) == {"tokenizer_config": {}}
