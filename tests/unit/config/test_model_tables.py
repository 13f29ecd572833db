"""docs/models.md matches the registries."""

import re

import pytest

from encoders.registry import FAMILIES
from mimo_train.config.pretrained.composites import COMPOSITES
from mimo_train.families.registry import FAMILIES as LANGUAGE_FAMILIES
from scripts import model_tables
from scripts.key_tables import Undescribed

PAGE = model_tables.PAGE.read_text()


def test_the_page_is_current():
    assert model_tables.current(PAGE) == PAGE, f"run `{model_tables.WRITE}`"


def test_each_model_type_is_there():
    encoders = {kind for family in FAMILIES.values() for kind in family.readers}
    kinds = {*LANGUAGE_FAMILIES, *encoders, *COMPOSITES}
    assert len(kinds) > 20
    assert kinds <= set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|.*", PAGE, re.MULTILINE))))


def test_what_readers_require_is_found():
    rows = {row.split("`")[1]: row for row in model_tables.parts()["encoders"].splitlines() if row.startswith("| [`")}
    assert "`num_channels` 3, `attention_dropout` 0.0" in rows["clip"]
    assert "`encoder_layerdrop` 0.0" in rows["whisper"]


@pytest.mark.parametrize(
    "change",
    [
        lambda page: page.replace("`qwen3_moe`", "`qwen4`"),
        lambda page: page.replace(model_tables.pinned_version(), "5.0.0"),
        lambda page: re.sub(r"\| `mixtral`.*\n", "", page),
    ],
)
def test_a_page_that_is_not_current_is_noticed(change):
    changed = change(PAGE)
    assert changed != PAGE and model_tables.current(changed) == PAGE


def test_a_part_without_markers_is_named():
    with pytest.raises(Undescribed, match=r"models\.md needs markers for"):
        model_tables.current(PAGE.replace("<!-- begin encoders -->", ""))
