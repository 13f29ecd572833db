"""The config of a model from its Hugging Face directory alone, for generation."""

import math
from pathlib import Path
from typing import Any

from mimo_train.config.compose import from_dict
from mimo_train.config.errors import ConfigError, Fault, UserError
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.pretrained.adapter import CONFIG, adapted_paths, paths_of
from mimo_train.config.pretrained.composites import composite_of
from mimo_train.config.pretrained.composites.of_transformers import OfTransformers
from mimo_train.config.pretrained.directory import read_directory
from mimo_train.config.pretrained.fill_in import directories, fill_in
from mimo_train.config.pretrained.hub import located
from mimo_train.config.pretrained.weight_files import Unreadable, parsed, read_error
from mimo_train.config.schema import ConfigContainer

LONGEST = 4096
"""Default sequence length, if the directory sets none."""

_MODULES = {"vision_config": "images", "audio_config": "audio"}
"""Name of an encoder's module, by its part of config.json."""
_OF_KINDS = {"image": "images", "audio": "audio"}
_PRECISION = {"bfloat16": "bf16", "float16": "fp16"}


def config_of_directory(folder: Path, seconds: float = 0, tokenizer: str = "") -> ConfigContainer:
    """Return a run of the model in a directory, or of an adapter with its base model, without data.

    Args:
        seconds: length of the longest audio that it is to read, which no directory says.
        tokenizer: the tokenizer if the directory has none.

    Raises:
        ConfigError: it is no directory of a supported language model, with or without encoders, or of its reward model.
        UserError: its adapter cannot be read, or has its base model elsewhere.
    """
    adapter, base = folder, base_of_adapter(folder)
    folder = base or folder
    directory = read_directory(str(folder), "CHECKPOINT")
    composite = composite_of(directory)
    if isinstance(composite, OfTransformers):
        encoders = [_OF_KINDS[kind] for kind in composite.kinds]
    else:
        has_encoder = composite is not None and composite.projector is not None and composite.encoder in _MODULES
        encoders = [_MODULES[composite.encoder]] if composite is not None and has_encoder else []
    names = [*encoders, LANGUAGE]
    plain: dict[str, Any] = {"modules": {name: {"pretrained": str(folder)} for name in names}, "data": {}}
    if tokenizer and not directory.has_tokenizer:
        plain["data"]["tokenizer"] = tokenizer
    paths = adapted_paths(adapter) if base else []
    of_language = set(paths_of(paths, LANGUAGE))
    for name in names:
        if any((path in of_language) == (name == LANGUAGE) for path in paths):
            plain["modules"][name]["lora"] = {"adapter": str(adapter)}
    fill_in(plain, directories(plain), tokenizer_is_given=bool(plain["data"]))
    for name in encoders:
        encoder = plain["modules"][name]["encoder"]
        if encoder["family"] in ("media_audio", "tower_audio"):
            encoder["max_seconds"] = max(encoder["max_seconds"], math.ceil(seconds))
    length = plain["modules"][LANGUAGE]["llm"].get("max_positions") or LONGEST
    plain["data"] |= {"shards": str(folder), "sequence_length": length}
    dtype = directory.config.get("dtype") or directory.config.get("torch_dtype") or "float32"
    plain["train"] = {"precision": _PRECISION.get(dtype, "fp32")}
    if directory.has_value_head:
        plain["train"]["task"] = "reward"
    return from_dict(plain)


def is_directory_of_a_model(folder: Path) -> bool:
    """True for a Hugging Face or PEFT directory; False for runs and checkpoints."""
    return (folder / "config.json").is_file() or (folder / CONFIG).is_file()


def base_of_adapter(folder: Path) -> Path | None:
    """Return the folder of the base model of a PEFT adapter; None if `folder` holds a model itself.

    Raises:
        UserError: the adapter cannot be read, or its base model is no folder of this machine.
    """
    if (folder / "config.json").is_file():
        return None
    try:
        name = parsed((folder / CONFIG).read_bytes()).get("base_model_name_or_path")
    except (Unreadable, OSError) as error:
        raise UserError(f"CHECKPOINT: {read_error(folder / CONFIG, error)}") from error
    if isinstance(name, str):
        try:
            name = located(name, "CHECKPOINT")
        except ConfigError as error:
            text = f"{folder} holds an adapter of PEFT for {name!r}: {error.faults[0].message}"
            raise ConfigError([Fault("CHECKPOINT", text)]) from error
    if not isinstance(name, str) or not Path(name).is_dir():
        raise UserError(
            f"CHECKPOINT: {folder} holds an adapter of PEFT for {name!r}, which is no folder here: set "
            f"base_model_name_or_path in its {CONFIG} to the folder of that model"
        )
    return Path(name)
