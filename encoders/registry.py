"""The encoder families: one table from family name to its spec and its builder. Imports no torch until one is built."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from encoders.clip.spec import ClipSpec
from encoders.dino.spec import Dinov2Spec, Dinov3Spec
from encoders.qwen_vit.spec import QwenVitSpec
from encoders.siglip.spec import Siglip2Spec, SiglipSpec
from encoders.vit.spec import VisionSpec
from encoders.whisper.spec import WhisperSpec

if TYPE_CHECKING:
    from encoders.spec import EncoderSpec
    from encoders.staged import StagedEncoder
    from encoders.weight_map import WeightMap


@dataclass(frozen=True)
class Family:
    """How one family of encoders is described and built."""

    spec: type
    """Dataclass of its sizes (see `encoders.spec`)."""
    builder: str
    """`module:attribute` of a class called as `encoders.staged.StagedEncoder`."""

    readers: Mapping[str, str] = field(default_factory=dict)
    """What reads the directory of a pretrained model, by `model_type` of its config.json: `module:function` of
    (config, preprocessor's config) -> values of the spec's fields. Imports no torch."""
    weights: str = ""
    """`module:function` of a spec -> its `WeightMap`, with our names as in the builder's class. Imports no torch."""

    def load(self) -> type["StagedEncoder"]:
        """The builder itself. Imports torch and Megatron-Core."""
        return _named(self.builder)

    def read(self, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> dict[str, Any]:
        """Values of the spec's fields of a pretrained encoder.

        Args:
            config: config.json of its directory, or the part of it that is about the encoder.
            preprocessor: preprocessor_config.json; empty where the directory has none.

        Raises:
            EncoderError: a value that this family cannot be built with.
        """
        return _named(self.readers[config["model_type"]])(config, preprocessor)

    def weight_map(self, spec: "EncoderSpec") -> "WeightMap":
        """How the parameters of a pretrained encoder are made of the tensors of its directory."""
        return _named(self.weights)(spec)


def _named(place: str) -> Any:
    module, attribute = place.split(":")
    return getattr(import_module(module), attribute)


_PATCHES = "encoders.vit.model:VisionTransformer"

FAMILIES: dict[str, Family] = {
    "vit": Family(spec=VisionSpec, builder=_PATCHES),
    "clip": Family(
        spec=ClipSpec,
        builder=_PATCHES,
        readers=dict.fromkeys(("clip", "clip_vision_model"), "encoders.clip.weights:read"),
        weights="encoders.clip.weights:weight_map",
    ),
    "siglip": Family(
        spec=SiglipSpec,
        builder=_PATCHES,
        readers=dict.fromkeys(("siglip", "siglip_vision_model"), "encoders.siglip.weights:read"),
        weights="encoders.siglip.weights:weight_map",
    ),
    "siglip2": Family(
        spec=Siglip2Spec,
        builder=_PATCHES,
        readers=dict.fromkeys(("siglip2", "siglip2_vision_model"), "encoders.siglip.weights:read_native"),
        weights="encoders.siglip.weights:weight_map",
    ),
    "dinov2": Family(
        spec=Dinov2Spec,
        builder=_PATCHES,
        readers=dict.fromkeys(("dinov2", "dinov2_with_registers"), "encoders.dino.weights:read"),
        weights="encoders.dino.weights:weight_map",
    ),
    "dinov3": Family(
        spec=Dinov3Spec,
        builder=_PATCHES,
        readers={"dinov3_vit": "encoders.dino.weights:read_3"},
        weights="encoders.dino.weights:weight_map_3",
    ),
    "qwen_vit": Family(
        spec=QwenVitSpec,
        builder="encoders.qwen_vit.model:QwenVisionTransformer",
        readers=dict.fromkeys(("qwen2_5_vl", "qwen2_5_vl_vision"), "encoders.qwen_vit.weights:read"),
        weights="encoders.qwen_vit.weights:weight_map",
    ),
    "whisper": Family(
        spec=WhisperSpec,
        builder="encoders.whisper.model:WhisperEncoder",
        readers={"whisper": "encoders.whisper.weights:read"},
        weights="encoders.whisper.weights:weight_map",
    ),
}
"""Every family, by the name that `encoder.family` gives."""
