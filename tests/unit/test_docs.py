"""The documentation of the config is whole."""

import dataclasses
from pathlib import Path

import pytest

from encoders.projectors.spec import ProjectorSpec
from encoders.vit.spec import VisionSpec
from encoders.whisper.spec import WhisperSpec
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import FeatureCacheConfig, LayoutConfig, LoraConfig, ModuleOptimConfig

DOCS = Path(__file__).resolve().parents[2] / "docs"
SECTIONS = {
    field.name: type(getattr(ConfigContainer(), field.name))
    for field in dataclasses.fields(ConfigContainer)
    if field.name != "modules"
}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_of_a_section_is_described(section):
    text = (DOCS / "configuration.md").read_text()
    missing = [field.name for field in dataclasses.fields(SECTIONS[section]) if f"`{section}.{field.name}`" not in text]
    assert not missing


def test_every_key_of_a_module_is_described():
    text = (DOCS / "configuration.md").read_text()
    fields = [f"`modules.NAME.layout.{field.name}`" for field in dataclasses.fields(LayoutConfig)]
    for part, kind in (("lora", LoraConfig), ("feature_cache", FeatureCacheConfig)):
        fields += [f"`modules.NAME.{part}.{field.name}`" for field in dataclasses.fields(kind)]
    fields.append("`modules.NAME.prefetch_microbatches`")
    fields += [
        f"`{field.name}`"
        for kind in (LlmSpec, ModuleOptimConfig, VisionSpec, WhisperSpec, ProjectorSpec)
        for field in dataclasses.fields(kind)
    ]
    assert not [name for name in fields if name not in text]
