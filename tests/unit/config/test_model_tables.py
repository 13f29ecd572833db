"""docs/models.md matches the registries."""

import json
import re

import pytest

from encoders.registry import FAMILIES
from mimo_train.config.compose import load
from mimo_train.config.errors import ConfigError
from mimo_train.config.pretrained import unsupported
from mimo_train.config.pretrained.composites import COMPOSITES
from mimo_train.families.registry import FAMILIES as LANGUAGE_FAMILIES
from scripts import model_tables

PAGE = model_tables.PAGE.read_text()


def test_the_page_is_current():
    assert model_tables.current(PAGE) == PAGE, f"run `{model_tables.WRITE}`"


def test_each_model_type_is_there():
    encoders = {kind for family in FAMILIES.values() for kind in family.readers}
    kinds = {*LANGUAGE_FAMILIES, *encoders, *COMPOSITES}
    assert len(kinds) > 20
    assert kinds <= set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|.*", PAGE, re.MULTILINE))))


def test_every_type_of_transformers_has_a_tier_or_a_reason():
    media, texts = model_tables.tiers_of_types()
    assert len(media) > 110 and len(texts) > 170
    types = media | texts
    assert [kind for kind, tier in types.items() if not tier.name and not tier.reason] == []
    assert unsupported.MEDIA.keys() <= media.keys() and unsupported.LANGUAGE.keys() <= texts.keys()
    assert types.keys() <= set(re.findall(r"`([\w.-]+)`", PAGE))


@pytest.mark.parametrize(("kind", "config"), [("mllama", "vlm_digits"), ("musicgen", "gpt_tiny")])
def test_an_unsupported_type_is_named_with_its_reason(kind, config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    reason = (unsupported.MEDIA | unsupported.LANGUAGE)[kind]
    with pytest.raises(ConfigError, match=f"^pretrained: .* a {kind} {reason}, which is not supported"):
        load(config, [f"pretrained={tmp_path}"])
