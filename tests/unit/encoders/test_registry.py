"""Families of users: paths, entry points, and what is wrong with them."""

import re
import sys
import uuid

import pytest

from encoders import registry
from encoders.errors import EncoderError
from encoders.registry import FAMILIES, family_of
from mimo_train.config.compose import from_dict
from mimo_train.config.errors import ConfigError

SPEC = """
from dataclasses import dataclass
from encoders.plain.spec import ImageSpec
from encoders.native.vit.patch_spec import VisionSpec

@dataclass
class Good(ImageSpec):
    hidden_size: int = 8
    stride: int = 8
    builder = "{module}:Model"
    def grid(self, height, width): return height // self.stride, width // self.stride
    def num_parameters(self): return 1

@dataclass
class NoBuilder(Good):
    builder = ""

@dataclass
class BuilderIsAKey(Good):
    builder: str = "{module}:Model"

@dataclass
class BuilderNowhere(Good):
    builder = "no_such_package.model:Model"

@dataclass
class NoGrid(ImageSpec):
    builder = "{module}:Model"

@dataclass
class NoProtocol:
    name: str = "x"
    builder = "{module}:Model"

@dataclass
class Deep(VisionSpec):
    builder = "encoders.native.vit.model:VisionTransformer"

@dataclass
class WrongKind(VisionSpec):
    builder = "{module}:Model"

class Model: pass
"""


@pytest.fixture
def module(tmp_path, monkeypatch) -> str:
    """Name of a user's module that is found."""
    name = f"own_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(SPEC.format(module=name))
    (tmp_path / f"{name}_broken.py").write_text("import a_library_that_is_missing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


@pytest.mark.parametrize("sign", [":", "."])
def test_a_path_leads_to_the_spec_and_its_keys_are_checked(module, sign):
    family = family_of(f"{module}{sign}Good")
    assert family.is_plain and family.builder == f"{module}:Model"
    keys = {"family": f"{module}{sign}Good", "stride": 16}
    cfg = from_dict({"modules": {"images": {"encoder": keys}}})
    assert cfg.modules["images"].encoder.num_tokens(1, 1) == 14 * 14
    with pytest.raises(ConfigError, match=r"modules\.images\.encoder\.strid: unknown key. Did you mean stride"):
        from_dict({"modules": {"images": {"encoder": {"family": keys["family"], "strid": 16}}}})
    with pytest.raises(ConfigError, match=r"modules\.images\.encoder\.stride: "):
        from_dict({"modules": {"images": {"encoder": keys | {"stride": "wide"}}}})


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("{}:NoBuilder", "needs builder = "),
        ("{}:BuilderIsAKey", "as ClassVar"),
        ("{}:BuilderNowhere", "no module no_such_package.model"),
        ("{}:NoGrid", "lacks grid, num_parameters"),
        ("{}:NoProtocol", "is no encoder's spec"),
        ("{}:Model", "is no dataclass"),
        ("{}:Goood", "has no Goood. Did you mean Good"),
        ("{}_broken:Good", "importing .* fails: ModuleNotFoundError: .*a_library_that_is_missing"),
        ("{}_none:Good", "there is no module .*_none: install its package"),
        ("encoders.mine:Good", "encoders is a package of mimo-train itself"),
        ("{}:a b", "reads package.module:Class"),
        ("vitt", "Did you mean vit"),
    ],
)
def test_what_is_wrong_is_named_with_its_key(module, path, said):
    with pytest.raises(ConfigError) as error:
        from_dict({"modules": {"images": {"encoder": {"family": path.format(module)}}}})
    assert str(error.value).startswith("modules.images.encoder.family: ") and re.search(said, str(error.value))


def install(folder, package: str, **points: str) -> None:
    """Metadata of an installed package with these entry points."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{registry.GROUP}]", *lines, ""]))


def test_entry_points_name_families_and_clashes_are_named(module, tmp_path):
    install(tmp_path, "first", conv=f"{module}:Good", vit=f"{module}:Good", twice=f"{module}:Good")
    install(tmp_path, "second", twice=f"{module}:NoGrid")
    registry._installed.cache_clear()
    try:
        assert family_of("conv").spec.__name__ == "Good"
        assert family_of("whisper") == FAMILIES["whisper"]
        with pytest.raises(EncoderError, match="'vit' is a family of mimo-train, and the package first"):
            family_of("vit")
        with pytest.raises(EncoderError, match="registered by the package first .* the package second"):
            family_of("twice")
        with pytest.raises(EncoderError, match="Did you mean conv"):
            family_of("conf")
    finally:
        registry._installed.cache_clear()


def test_a_spec_of_layers_is_built_by_its_staged_encoder(module):
    from encoders.native.vit.model import VisionTransformer

    family = family_of(f"{module}:Deep")
    assert not family.is_plain and family.load() is VisionTransformer
    for name, base in (("WrongKind", "StagedEncoder"), ("Good", "Module")):
        with pytest.raises(EncoderError, match=f"is no subclass of .*{base}"):
            family_of(f"{module}:{name}").load()


def test_a_replaced_family_is_named_with_what_replaces_it():
    with pytest.raises(EncoderError, match="Set pretrained of the module to the directory"):
        family_of("transformers")
