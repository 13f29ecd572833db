"""The encoder families: `encoder.family` names the spec and the builder. torch is imported only when an encoder is
built, unless the module of a user's spec imports it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

from encoders.base import EncoderSpec
from encoders.errors import EncoderError
from encoders.joined.spec import JoinedSpec
from encoders.key_rules import nearest
from encoders.native.clip.spec import ClipSpec, Siglip2Spec, SiglipSpec
from encoders.native.dino.spec import Dinov2Spec, Dinov3Spec
from encoders.native.qwen_vit.spec import Qwen3VitSpec, QwenVitSpec
from encoders.native.vit.patch_spec import VisionSpec
from encoders.native.whisper.spec import QwenAudioSpec, WhisperSpec
from encoders.plain.spec import PlainSpec
from encoders.transformers_media.spec import MediaAudio, MediaImages
from encoders.transformers_media.tower_spec import TowerAudio, TowerImages

if TYPE_CHECKING:
    from encoders.plain.model import PlainEncoder
    from encoders.pretrained import Published
    from encoders.staged import StagedEncoder
    from encoders.weight_map import WeightMap

GROUP = "mimo_train.encoders"
"""Entry point group in which installed packages register a family: `NAME = "package.module:Spec"`."""

PACKAGES = ("mimo_train", "encoders", "data")
"""Names of mimo-train's own packages, which a user's package cannot have."""


@dataclass(frozen=True)
class Family:
    """The spec and the builder of one family of encoders."""

    spec: type
    """Dataclass of its sizes: see `encoders.base`, and for plain torch modules `encoders.plain.spec`."""
    builder: str
    """`module:attribute` of a class called as `encoders.staged.StagedEncoder`, or of the torch module of a plain
    encoder."""

    readers: Mapping[str, str] = field(default_factory=dict)
    """{`model_type` of a pretrained model's config.json: `module:function`}. The function maps (config, preprocessor's
    config) to values of the spec's fields."""
    weights: str = ""
    """`module:function` that maps a spec to its `WeightMap`, with our names as in the builder's class."""

    writer: str = ""
    """`module:function` that maps a spec to its `Published` form in `transformers`."""

    @property
    def is_plain(self) -> bool:
        """True if the encoder is a plain torch module."""
        return issubclass(self.spec, PlainSpec)

    def load(self) -> "type[StagedEncoder] | type[PlainEncoder]":
        """Return the builder. Imports torch and Megatron-Core. Raise EncoderError if it does not exist, or is not a
        class of its kind."""
        builder = _attribute(*_parted(self.builder, f"builder of {self.spec.__name__}"))
        from torch.nn import Module

        from encoders.plain.model import PlainEncoder, plain_encoder
        from encoders.staged import StagedEncoder

        base = Module if self.is_plain else StagedEncoder
        if not (isinstance(builder, type) and issubclass(builder, base)):
            raise EncoderError(
                f"{self.builder}, the builder of {self.spec.__name__}, is no subclass of {base.__module__}."
                f"{base.__name__}: "
                + ("name the class of the module" if self.is_plain else "derive it, or the spec from ImageSpec")
            )
        is_module = self.is_plain and not issubclass(builder, PlainEncoder)
        return plain_encoder(builder) if is_module else cast(type[StagedEncoder], builder)

    def read(self, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of the spec's fields of a pretrained encoder.

        Args:
            config: config.json of its directory, or the encoder's part of it.
            preprocessor: preprocessor_config.json; empty if the directory has none.

        Raises:
            EncoderError: this family does not support a value.
        """
        return _imported(self.readers[config["model_type"]])(config, preprocessor)

    def weight_map(self, spec: EncoderSpec) -> "WeightMap":
        """Return the map from the tensors of a pretrained encoder's directory to its parameters."""
        return _imported(self.weights)(spec)

    def published(self, spec: EncoderSpec) -> "Published":
        """Return an encoder made here in the format of `transformers`; its weights are those of `weight_map`. Raise
        EncoderError with the reason if `transformers` has no class for it."""
        if not self.writer:
            raise EncoderError(f"transformers has no class for an encoder of family {spec.family} alone")
        return _imported(self.writer)(spec)


def _imported(place: str) -> Any:
    module, attribute = place.split(":")
    return getattr(import_module(module), attribute)


_PATCHES = "encoders.native.vit.model:VisionTransformer"

FAMILIES: dict[str, Family] = {
    "vit": Family(
        spec=VisionSpec,
        builder=_PATCHES,
        weights="encoders.native.clip.weights:weight_map",
        writer="encoders.native.clip.weights:published_siglip",
    ),
    "clip": Family(
        spec=ClipSpec,
        builder=_PATCHES,
        readers=dict.fromkeys(("clip", "clip_vision_model"), "encoders.native.clip.weights:read"),
        weights="encoders.native.clip.weights:weight_map",
        writer="encoders.native.clip.weights:published",
    ),
    "siglip": Family(
        spec=SiglipSpec,
        builder=_PATCHES,
        readers=dict.fromkeys(("siglip", "siglip_vision_model"), "encoders.native.clip.weights:read_siglip"),
        weights="encoders.native.clip.weights:weight_map",
        writer="encoders.native.clip.weights:published_siglip",
    ),
    "siglip2": Family(
        spec=Siglip2Spec,
        builder=_PATCHES,
        readers=dict.fromkeys(("siglip2", "siglip2_vision_model"), "encoders.native.clip.weights:read_siglip2"),
        weights="encoders.native.clip.weights:weight_map",
        writer="encoders.native.clip.weights:published_siglip2",
    ),
    "dinov2": Family(
        spec=Dinov2Spec,
        builder=_PATCHES,
        readers=dict.fromkeys(("dinov2", "dinov2_with_registers"), "encoders.native.dino.weights:read"),
        weights="encoders.native.dino.weights:weight_map",
        writer="encoders.native.dino.weights:published",
    ),
    "dinov3": Family(
        spec=Dinov3Spec,
        builder=_PATCHES,
        readers={"dinov3_vit": "encoders.native.dino.weights:read_3"},
        weights="encoders.native.dino.weights:weight_map_3",
        writer="encoders.native.dino.weights:published_3",
    ),
    "qwen_vit": Family(
        spec=QwenVitSpec,
        builder="encoders.native.qwen_vit.model:QwenVisionTransformer",
        readers=dict.fromkeys(("qwen2_5_vl", "qwen2_5_vl_vision"), "encoders.native.qwen_vit.weights:read"),
        weights="encoders.native.qwen_vit.weights:weight_map",
    ),
    "qwen3_vit": Family(
        spec=Qwen3VitSpec,
        builder="encoders.native.qwen_vit.model:Qwen3VisionTransformer",
        readers=dict.fromkeys(
            ("qwen3_vl", "qwen3_vl_vision", "qwen3_vl_moe", "qwen3_vl_moe_vision"),
            "encoders.native.qwen_vit.weights:read_qwen3",
        ),
        weights="encoders.native.qwen_vit.weights:weight_map_qwen3",
    ),
    "whisper": Family(
        spec=WhisperSpec,
        builder="encoders.native.whisper.model:WhisperEncoder",
        readers={"whisper": "encoders.native.whisper.weights:read"},
        weights="encoders.native.whisper.weights:weight_map",
        writer="encoders.native.whisper.weights:published",
    ),
    "qwen_audio": Family(
        spec=QwenAudioSpec,
        builder="encoders.native.whisper.model:QwenAudioEncoder",
        readers={"qwen2_audio_encoder": "encoders.native.whisper.weights:read_qwen_audio"},
        weights="encoders.native.whisper.weights:weight_map_qwen_audio",
    ),
    "joined": Family(spec=JoinedSpec, builder="encoders.joined.model:JoinedEncoder"),
    "media_images": Family(spec=MediaImages, builder=MediaImages.builder),
    "media_audio": Family(spec=MediaAudio, builder=MediaAudio.builder),
    "tower_images": Family(spec=TowerImages, builder=TowerImages.builder),
    "tower_audio": Family(spec=TowerAudio, builder=TowerAudio.builder),
}
"""The families of this package, by name. `family_of` also finds those of users."""


def family_of(name: str) -> Family:
    """Return the family that `encoder.family` names.

    It is one of `FAMILIES`, an entry point of `GROUP`, or the path of a spec, `package.module:Spec` or
    `package.module.Spec`, which is imported.

    Raises:
        EncoderError: there is none, several have the name, or the path leads to no spec; with the remedy.
    """
    if is_path(name):
        return _by_path(name)
    entries = _installed().get(name, [])
    if name in FAMILIES and entries:
        raise EncoderError(
            f"{name!r} is a family of mimo-train, and {_origin(entries[0])} registers another under this name: rename "
            f"that entry point, or give its path: {entries[0].value}"
        )
    if len(entries) > 1:
        raise EncoderError(
            f"{name!r} is registered by {' and '.join(_origin(entry) for entry in entries)}: give the path of one, "
            f"{' or '.join(entry.value for entry in entries)}"
        )
    if entries:
        return _by_path(entries[0].value)
    if name in FAMILIES:
        return FAMILIES[name]
    if name in ("transformers", "transformers_audio"):
        remedy = "Set pretrained of the module to the directory, and implementation=transformers, not encoder.path"
        raise EncoderError(f"encoder family {name!r} was removed. {remedy}")
    families = [*FAMILIES, *_installed()]
    raise EncoderError(
        f"unknown encoder family {name!r}. Name your own by its path, package.module:Spec (docs/your-encoder.md). "
        f"{nearest(name, families)}"
    )


def is_path(name: str) -> bool:
    """True if a family's name is the path of a class, not a registered name."""
    return "." in name or ":" in name


def registered(name: str) -> list[str]:
    """Return descriptions of the entry points registered under a family's name. Nothing is imported."""
    return [_origin(point) for point in _installed().get(name, [])]


@cache
def _installed() -> dict[str, list[EntryPoint]]:
    entries: dict[str, list[EntryPoint]] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.dist.name if point.dist else ""):
        entries.setdefault(point.name, []).append(point)
    return entries


def _origin(point: EntryPoint) -> str:
    package = f"the package {point.dist.name}" if point.dist else "a package"
    return f"{package} ({point.value})"


def _by_path(path: str) -> Family:
    spec = _attribute(*_parted(path, "family"))
    wrong = _why_no_spec(spec)
    if wrong:
        raise EncoderError(f"{path} {wrong}")
    family = Family(spec, spec.builder)
    module, _ = _parted(family.builder, f"builder of {spec.__name__}")
    try:
        is_there = find_spec(module) is not None
    except ImportError:
        is_there = False
    if not is_there:
        raise EncoderError(f"{path}: there is no module {module}, which its builder {family.builder!r} names")
    return family


def _parted(path: str, what: str) -> tuple[str, str]:
    """Split `module:attribute` or `module.attribute` into (module, attribute)."""
    module, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not all(part.isidentifier() for part in [*module.split("."), attribute]):
        raise EncoderError(f"{what} {path!r} is no path of a class: it reads package.module:Class")
    return module, attribute


def _attribute(module: str, attribute: str) -> Any:
    """Import a module and return its `attribute`."""
    try:
        value = import_module(module)
    except Exception as error:  # a user's module may raise anything
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{module}.".startswith(f"{missing}."):
            raise EncoderError(f"importing {module} fails: {type(error).__name__}: {error}") from error
        package = module.partition(".")[0]
        remedy = (
            f"{package} is a package of mimo-train itself: give yours another name"
            if package in PACKAGES
            else "install its package, or put its folder on PYTHONPATH, or start in that folder, on every node"
        )
        raise EncoderError(f"there is no module {missing}: {remedy}") from error
    if not hasattr(value, attribute):
        names = [name for name in vars(value) if not name.startswith("_")]
        hint = nearest(attribute, names)
        raise EncoderError(f"{module} ({getattr(value, '__file__', None)}) has no {attribute}. {hint}")
    return getattr(value, attribute)


def _why_no_spec(value: Any) -> str:
    """Return the reason why a class is not the spec of a user's family; empty if it is."""
    if not (isinstance(value, type) and dataclasses.is_dataclass(value)):
        return (
            "is no dataclass: family names the dataclass with the encoder's sizes, and that names the module as its "
            "builder"
        )
    fields = {field.name for field in dataclasses.fields(value)}
    builder = getattr(value, "builder", "")
    if "builder" in fields or not isinstance(builder, str) or not builder:
        return (
            'does not name the class of its module: it needs builder = "package.module:Class", without a type or as '
            "ClassVar[str]"
        )
    if not issubclass(value, EncoderSpec):
        return (
            "is no encoder's spec: derive it from encoders.plain.spec.ImageSpec or AudioSpec (plain torch), or "
            "from a spec in encoders.native"
        )
    missing = sorted(getattr(value, "__abstractmethods__", frozenset()) | {"name", "family"} - fields)
    return f"lacks {', '.join(missing)} (see encoders.base)" if missing else ""
