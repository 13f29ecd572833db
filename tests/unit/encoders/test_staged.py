"""What every family of encoders must have."""

import pytest

from encoders.plain.model import PlainEncoder
from encoders.registry import FAMILIES
from encoders.staged import StagedEncoder


@pytest.mark.parametrize("missing", ["_build_embeddings", "_embed", "_features", "_tokens"])
def test_a_family_without_one_of_its_parts_cannot_be_built(missing):
    parts = {name: lambda self: None for name in StagedEncoder.__abstractmethods__ - {missing}}
    with pytest.raises(TypeError, match=missing):
        type("Incomplete", (StagedEncoder,), parts)()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_complete_and_known_to_its_spec(family):
    builder = FAMILIES[family].load()
    assert issubclass(builder, PlainEncoder if FAMILIES[family].is_plain else StagedEncoder)
    assert not getattr(builder, "__abstractmethods__", None)
    assert FAMILIES[family].spec().family == family
