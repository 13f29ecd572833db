"""The description of a model of several parts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
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
    """Prefixes that the encoder's tensors may have."""
    encoder_loaded: str | None = None
    """Prefix of the encoder's and projector's tensors in the memory of transformers 5; None: that of the encoder
    alone."""
    language_names: tuple[Spelling, ...] = ()
    """Prefixes that the language model's tensors may have; empty: those of the language model alone."""
    absent: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Defaults of parts that config.json may lack."""
    encoder_keys: Callable[[Mapping[str, Any], type, Mapping[str, Any]], dict[str, Any]] | None = None
    """(config.json, class of the encoder's spec, keys that its own part gives) -> keys of what is read of it."""
    preprocessor: Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]] | None = None
    """(config.json, preprocessor's config) -> the preprocessor's config as the encoder alone would have it."""
    pad_id: Callable[[Mapping[str, Any]], int] | None = None
    """config.json -> id of the token that is repeated for each token of a medium."""
    processor: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    """config.json -> keys that its processor needs, and that processor_config.json may lack."""
    projector: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    """config.json -> keys of the projector; None: the directory has none."""
    projector_weights: Callable[[ModuleConfig, int], WeightMap] | None = None
    """(encoder module, width of the language model) -> the projector's weights."""

    placeholder: Mapping[str, str] = field(default_factory=dict)
    """Keys of the encoder module's `placeholder` that its tokenizer has tokens for."""

    def spellings(self, folder: Path, key: str) -> tuple[Spelling, ...]:
        """Return the prefixes that the language model's tensors may have in `folder`; `key` names it in errors."""
        return self.language_names or ("",)

    def part(self, config: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Return the part of config.json for `language` or an encoder."""
        key = self.language if name == LANGUAGE else self.encoder
        default = self.absent.get(key)
        if config.get(key) is None:
            part = dict(default or config)
        else:
            part = {**({"model_type": default["model_type"]} if default else {}), **config[key]}
        if name == LANGUAGE and key and config.get("tie_word_embeddings"):
            part["tie_word_embeddings"] = True  # the output layer belongs to the whole model
        return part

    def with_vocabulary(self, config: Mapping[str, Any], rows: int) -> dict[str, Any]:
        """Return config.json of a model with `rows` rows in its embedding."""
        if self.part(config, LANGUAGE).get("vocab_size") == rows:
            return dict(config)
        text = config.get(self.language) or self.absent.get(self.language) or {}
        is_outer = not self.language or ("vocab_size" in config and not text)  # early files
        inner = {} if is_outer else {self.language: {**text, "vocab_size": rows}}
        return {**config, **inner, **({"vocab_size": rows} if "vocab_size" in config or not inner else {})}
