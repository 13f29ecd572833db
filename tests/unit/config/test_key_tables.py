"""docs/configuration.md has every key and every shipped file."""

import dataclasses
import re
from dataclasses import fields

from encoders.registry import FAMILIES
from mimo_train.config.compose import NO_GROUPS
from mimo_train.config.keys import rules_of
from mimo_train.config.llm_spec import LlmSpec, RopeScaling
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import ModuleConfig
from scripts import key_tables

PAGE = key_tables.PAGE.read_text()


def test_the_page_is_current():
    assert key_tables.current(PAGE) == PAGE, f"run `{key_tables.WRITE}`"


def test_each_key_is_there():
    """Compared with the schema itself, so that no part is left out."""
    keys: set[str] = set()
    for section in sections():
        for field in fields(section.type):
            inner = fields(field.type) if dataclasses.is_dataclass(field.default_factory) else ()
            keys |= {f"{section.name}.{field.name}.{one.name}" for one in inner} or {f"{section.name}.{field.name}"}
    keys |= {field.name for field in fields(ConfigContainer)} - {section.name for section in sections()} - {"modules"}
    for field in fields(ModuleConfig):
        inner = fields(field.type) if dataclasses.is_dataclass(field.default_factory) else ()
        keys |= {f"modules.NAME.{field.name}.{one.name}" for one in inner} or {f"modules.NAME.{field.name}"}
    for kind in (LlmSpec, *(family.spec for family in FAMILIES.values())):
        for field in fields(kind):
            inner = fields(field.type) if dataclasses.is_dataclass(field.default_factory) else ()
            keys |= {f"{field.name}.{one.name}" for one in inner} or {field.name}
    assert len(keys) > 120
    assert keys <= set(re.findall(r"^\| \[?`([\w.]+)`[^|]* \|", PAGE, re.MULTILINE))


def sections() -> list[dataclasses.Field]:
    return [field for field in fields(ConfigContainer) if dataclasses.is_dataclass(field.default_factory)]


def test_each_shipped_file_is_there():
    for file in [*key_tables.CONFIGS.glob("*.yaml"), *key_tables.CONFIGS.glob("*/*.yaml")]:
        if file.parent.name in NO_GROUPS:
            continue  # recipes are in docs/recipes.md
        assert f"`{file.stem}`" in PAGE


def test_docstrings_name_the_values_that_the_checks_allow():
    kinds = [ModuleConfig, LlmSpec, RopeScaling, *(section.type for section in sections())]
    kinds += [field.type for field in fields(ModuleConfig) if dataclasses.is_dataclass(field.default_factory)]
    checked = 0
    for kind in kinds:
        meanings = key_tables.docstrings(kind)
        for field in fields(kind):
            choices = [choice for choice in rules_of(field).choices if choice]
            checked += len(choices)
            assert not [choice for choice in choices if f"`{choice}`" not in meanings[field.name]], field.name
    assert checked > 40
