"""The encoder families: one table from family name to its spec and its builder. Imports no torch until one is built."""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from encoders.vit.spec import VisionSpec
from encoders.whisper.spec import WhisperSpec

if TYPE_CHECKING:
    from encoders.staged import StagedEncoder


@dataclass(frozen=True)
class Family:
    """How one family of encoders is described and built."""

    spec: type
    """Dataclass of its sizes (see `encoders.spec`)."""
    builder: str
    """`module:attribute` of a class called as `encoders.staged.StagedEncoder`."""

    def load(self) -> type["StagedEncoder"]:
        """The builder itself. Imports torch and Megatron-Core."""
        module, attribute = self.builder.split(":")
        return getattr(import_module(module), attribute)


FAMILIES: dict[str, Family] = {
    "vit": Family(spec=VisionSpec, builder="encoders.vit.model:VisionTransformer"),
    "whisper": Family(spec=WhisperSpec, builder="encoders.whisper.model:WhisperEncoder"),
}
"""Every family, by the name that `encoder.family` gives."""
