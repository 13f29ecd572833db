"""docs/configuration.md has every key and every shipped file."""

import dataclasses
import re
from dataclasses import dataclass, fields

import pytest

from encoders.registry import FAMILIES
from mimo_train.config.compose import NO_GROUPS
from mimo_train.config.keys import rules_of
from mimo_train.config.llm_spec import LlmSpec, RopeScaling
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import ModuleConfig
from scripts import key_tables

PAGE = key_tables.PAGE.read_text()


@dataclass
class Sound:
    """A section whose fields have docstrings."""

    number: int = 3
    """Of something,
    over two lines."""
    needed: str = dataclasses.field(kw_only=True)
    """No default."""


@dataclass
class Override(Sound):
    """A section whose field has another default and the same meaning."""

    number: int = 4


@dataclass
class Silent:
    """A section with a field without a docstring."""

    number: int = 3
    """Of something."""
    other: int = 4


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
    assert keys <= set(re.findall(r"^\| `([\w.]+)` \|", PAGE, re.MULTILINE))


def sections() -> list[dataclasses.Field]:
    return [field for field in fields(ConfigContainer) if dataclasses.is_dataclass(field.default_factory)]


def test_each_shipped_file_is_there():
    for file in [*key_tables.CONFIGS.glob("*.yaml"), *key_tables.CONFIGS.glob("*/*.yaml")]:
        if file.parent.name in NO_GROUPS:
            continue  # recipes are in docs/recipes.md
        assert f"`{file.stem}`" in PAGE


@pytest.mark.parametrize(
    "change",
    [
        lambda page: page.replace("Optimizer steps in all", "Steps"),
        lambda page: page.replace("| `train.iters` | `1000` |", "| `train.iters` | `100` |"),
        lambda page: page.replace("`mlp_merge2`, `mlp_merge2_norm`", "`mlp_merge2_norm`"),
        lambda page: re.sub(r"\| `train\.iters`.*\n", "", page),
    ],
)
def test_a_page_that_is_not_current_is_noticed(change):
    changed = change(PAGE)
    assert changed != PAGE
    assert key_tables.current(changed) == PAGE


def test_each_family_of_encoders_has_its_keys_or_a_link_to_them():
    tables = {part[: part.index("\n")]: part for part in key_tables.parts()["encoders"].split("#### ")[1:]}
    headings = [*key_tables.SHARED.values(), *(f"family: {name}" for name in FAMILIES)]
    assert list(tables) == headings
    for name, family in FAMILIES.items():
        part, keys, defaults = tables[f"family: {name}"], set(), {}
        while part:
            rows = re.findall(r"^\| `([\w.]+)` \| (.+?) \|", part, re.MULTILINE)
            others = part.partition("Other defaults: ")[2].partition("\n")[0]
            rows += re.findall(r"`(\w+)` (empty|—|`.+?`)(?:, |\.$)", others)
            keys |= {key for key, _ in rows}
            defaults = dict(rows) | defaults  # own defaults override inherited ones
            base = re.search(r"^The keys of \[(.+?)\]", part, re.MULTILINE)
            part = tables[base[1]] if base else ""
        assert keys | {"name", "family"} == {field.name for field in fields(family.spec)}, name
        for field in fields(family.spec):
            if field.name not in ("name", "family"):
                assert defaults[field.name] == key_tables._default(field), (name, field.name)


def test_a_field_without_a_docstring_is_named():
    assert key_tables.docstrings(Sound) == {"number": "Of something, over two lines.", "needed": "No default."}
    assert key_tables.docstrings(Override) == key_tables.docstrings(Sound)
    with pytest.raises(key_tables.Undescribed, match=r"Silent\.other has no docstring"):
        key_tables.docstrings(Silent)


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
