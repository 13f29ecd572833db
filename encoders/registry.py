"""The encoder families: one table from family name to its spec and its builder. Imports no torch until one is built."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

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


FAMILIES: dict[str, Family] = {
    "vit": Family(spec=VisionSpec, builder="encoders.vit.model:VisionTransformer"),
    "whisper": Family(spec=WhisperSpec, builder="encoders.whisper.model:WhisperEncoder"),
}
"""Every family, by the name that `encoder.family` gives."""
