"""What is known of a model of several parts. Imports no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from encoders.weight_map import Spelling, WeightMap
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema_modules import ModuleConfig


@dataclass(frozen=True)
class Composite:
    """A vision-language or audio-language model."""

    encoder: str
    """Key of the encoder's part of config.json."""
    language: str = ""
    """Key of the language model's part; empty: config.json itself."""
    encoder_names: tuple[str, ...] = ("",)
    """What may be in front of the encoder's names."""
    language_names: tuple[Spelling, ...] = ()
    """How the language model's names may be spelt; empty: as alone."""
    projector: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    """config.json -> keys of the projector; None: the directory has none."""
    projector_weights: Callable[[ModuleConfig, int], WeightMap] | None = None
    """(encoder module, width of the language model) -> the projector's weights."""

    placeholder: Mapping[str, str] = field(default_factory=dict)
    """Keys of the encoder module's `placeholder` that its tokenizer has tokens for."""

    def part(self, config: Mapping[str, Any], name: str) -> dict[str, Any]:
        """The part of config.json that is about `language` or an encoder."""
        key = self.language if name == LANGUAGE else self.encoder
        return dict(config[key]) if key in config else dict(config)
