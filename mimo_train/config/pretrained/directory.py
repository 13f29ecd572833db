"""The JSON files of a Hugging Face directory."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mimo_train.config.errors import ConfigError, Fault
from mimo_train.config.pretrained.hub import model_keys, named_in_hub, say
from mimo_train.config.pretrained.weight_files import Unreadable, parsed, read_error, require_no_pointer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "tokenizer_config.json")
"""A directory with a tokenizer has one of these."""
_CLASSIFIER = "ForSequenceClassification"
"""Ends the names of the classes of `transformers` with a value head."""


@dataclass(frozen=True)
class Directory:
    """The content of a directory's files, except the weights."""

    folder: Path
    key: str
    """Config key that names it, for errors."""
    config: dict[str, Any]
    """config.json."""
    preprocessor: dict[str, Any] = field(default_factory=dict)
    """preprocessor_config.json; empty if there is none."""

    @property
    def model_type(self) -> str:
        """Family of the model, as named in `transformers`."""
        return self.config["model_type"]

    @property
    def name(self) -> str:
        """Name of the model, by its folder or in the hub."""
        return Path(named_in_hub(self.folder)[0]).name

    @property
    def has_value_head(self) -> bool:
        """True if the model gives a score instead of tokens."""
        return any(name.endswith(_CLASSIFIER) for name in self.config.get("architectures") or ())

    def token(self, number: int) -> str | None:
        """Return the tokenizer's token with this id; None if there is none. Raises ConfigError for a damaged file."""
        content = _read(self.folder / "tokenizer.json", self.key)
        listed = {entry["id"]: entry["content"] for entry in content.get("added_tokens") or ()}
        settings = _read(self.folder / "tokenizer_config.json", self.key).get("added_tokens_decoder") or {}
        listed |= {int(at): entry["content"] for at, entry in settings.items()}
        listed |= {at: token for token, at in _read(self.folder / "added_tokens.json", self.key).items()}
        if number in listed:
            return listed[number]
        vocabulary = (content.get("model") or {}).get("vocab") or {}
        if isinstance(vocabulary, dict):
            return next((token for token, at in vocabulary.items() if at == number), None)
        return vocabulary[number][0] if number < len(vocabulary) else None  # with a probability each

    @property
    def has_tokenizer(self) -> bool:
        """True if the directory contains a tokenizer."""
        return any((self.folder / name).is_file() for name in TOKENIZER_FILES)


def read_directory(folder: str, key: str) -> Directory:
    """Read the JSON files of a directory.

    Args:
        key: config key that names it.

    Raises:
        ConfigError: it does not exist, or has no config.json with a `model_type`.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(
            [
                Fault(
                    key,
                    f"no folder {folder}: give a directory as transformers' save_pretrained makes it, or the name of a "
                    "model on the hub, ORG/NAME",
                )
            ]
        )
    config = _read(path / "config.json", key)
    if "model_type" not in config:
        what = "there is no config.json in it" if not config else "its config.json has no model_type"
        raise ConfigError([Fault(key, f"{folder} is no model of transformers, {what}")])
    # Version 5 saves one file for text and images, with the image settings nested.
    processor = _read(path / "processor_config.json", key)
    inner = processor.get("image_processor") or processor.get("feature_extractor")
    return Directory(path, key, config, _read(path / "preprocessor_config.json", key) or inner or {})


def _read(path: Path, key: str) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        require_no_pointer(path)
        return parsed(path.read_bytes())
    except (Unreadable, OSError) as error:
        raise ConfigError([Fault(key, read_error(path, error))]) from error


def leave_out_absent(plain: dict[str, Any]) -> None:
    """Empty the keys of composed nested dicts whose directory does not exist, and say so on standard error."""
    for section, key, full in model_keys(plain):
        directory = section.get(key)
        if isinstance(directory, str) and directory and not Path(directory).exists():
            section[key] = ""
            say(f"{full}: {directory} is not on this machine. Sizes are those of the config.")
