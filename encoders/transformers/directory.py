"""Reads a directory of `transformers`: sizes of the model, constants of its preprocessing. A `config.json` omits the
defaults of its class. `KNOWN` has them for models whose number of tokens they determine."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from encoders.errors import EncoderError

_BASE = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "image_size": 224,
    "patch_size": 16,
}
_WAVES = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "intermediate_size": 3072,
    "conv_dim": [512] * 7,
    "conv_stride": [5, 2, 2, 2, 2, 2, 2],
    "conv_kernel": [10, 3, 3, 3, 3, 2, 2],
    "hidden_dropout": 0.1,
    "activation_dropout": 0.1,
    "attention_dropout": 0.1,
    "final_dropout": 0.1,
    "layerdrop": 0.1,
    "mask_time_prob": 0.05,
}


@dataclass(frozen=True)
class Known:
    """A model type whose tokens are known by formula."""

    kind: str
    """Kind of media: image or audio."""
    defaults: Mapping[str, Any]
    """Defaults of its config class."""
    prefix: int = 0
    """Tokens before the patches, without registers."""
    parts: tuple[str, ...] = field(default=())
    """Types of whole models that contain it, whose `vision_config` may omit its type."""


KNOWN = {
    "clip_vision_model": Known("image", _BASE | {"patch_size": 32}, 1, ("clip",)),
    "siglip_vision_model": Known("image", _BASE, 0, ("siglip",)),
    "dinov2": Known("image", _BASE | {"patch_size": 14, "mlp_ratio": 4}, 1),
    "dinov2_with_registers": Known("image", _BASE | {"num_register_tokens": 4, "mlp_ratio": 4}, 1),
    "dinov3_vit": Known(
        "image",
        _BASE | {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6, "num_register_tokens": 0},
        1,
    ),
    "vit": Known("image", _BASE, 1),
    "deit": Known("image", _BASE, 2),
    "ijepa": Known("image", _BASE, 0),
    "vit_msn": Known("image", _BASE, 1),
    "beit": Known("image", _BASE | {"drop_path_rate": 0.1}, 1),
    "whisper": Known(
        "audio",
        {
            "d_model": 384,
            "encoder_layers": 4,
            "encoder_ffn_dim": 1536,
            "num_mel_bins": 80,
            "max_source_positions": 1500,
        },
    ),
    "wav2vec2": Known("audio", _WAVES),
    "hubert": Known("audio", _WAVES),
    "wavlm": Known("audio", _WAVES),
}
"""Known models by the `model_type` of their config."""

SIZES = (
    *("hidden_size", "d_model", "num_hidden_layers", "encoder_layers", "intermediate_size", "encoder_ffn_dim"),
    *("num_mel_bins", "max_source_positions", "num_register_tokens"),
)
SIDES = ("image_size", "patch_size")
CONVOLUTIONS = ("conv_dim", "conv_kernel", "conv_stride")
MOST_SIZE = 2**24

DROPPED = ("dropout", "layerdrop", "drop_path_rate", "mask_time_prob", "mask_feature_prob")
"""Parts of the names of keys that set a probability of dropout or masking in training."""


ASIDE = (
    *("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "id2label", "label2id"),
    *("auto_map", "attn_implementation", "_attn_implementation", "_attn_implementation_internal"),
    *("experts_implementation", "_experts_implementation", "_experts_implementation_internal"),
)
"""Keys of a config that are ignored: features do not depend on them (how it was saved, names of a classifier's labels),
or they name code to load."""


def tower_config(path: str, part: str) -> dict[str, Any]:
    """Return the config of the tower of a directory: its `part` (`vision_config`, `audio_config`), if any, else all.
    Raise EncoderError without a `config.json`, or without a model type in it."""
    config = _read(Path(path) / "config.json")
    tower = config.get(part) or config
    if not isinstance(tower, dict):
        raise EncoderError(f"{part} of {path}/config.json is no mapping")
    of_part = next((name for name, entry in KNOWN.items() if config.get("model_type") in entry.parts), None)
    kind = tower.get("model_type") if tower is config else tower.get("model_type", of_part)
    kind = of_part if kind in {name for entry in KNOWN.values() for name in entry.parts} else kind
    if not kind:
        raise EncoderError(f"{path}/config.json does not say the model_type of its {part}: add it there")
    if config.get("quantization_config") or tower.get("quantization_config"):
        raise EncoderError(f"the weights of {path} are quantized (quantization_config), which is not read")
    return {key: value for key, value in tower.items() if key not in ASIDE} | {"model_type": kind}


def preprocessing(path: str, kind: str) -> dict[str, Any]:
    """Return the constants of a directory's processor; empty if it has none."""
    preprocessor_file = Path(path) / "preprocessor_config.json"
    if preprocessor_file.is_file():
        return _read(preprocessor_file)
    processor_file = Path(path) / "processor_config.json"
    part = {"image": "image_processor", "audio": "feature_extractor"}[kind]
    return _read(processor_file).get(part) or {} if processor_file.is_file() else {}


def resample(preprocessor: Mapping[str, Any]) -> Any:
    """Return how a preprocessor resizes, as Pillow numbers it; by default that of its class."""
    is_bilinear = str(preprocessor.get("image_processor_type")).startswith(("ViTImage", "DINOv3"))
    return preprocessor.get("resample", 2 if is_bilinear else 3)


def value_of(config: Mapping[str, Any], key: str) -> Any:
    """Return a key of a model's config, or its default; None if neither is known."""
    entry = KNOWN.get(str(config.get("model_type")))
    value = config.get(key)
    return entry.defaults.get(key) if value is None and entry else value


def require_sizes(config: Mapping[str, Any]) -> None:
    """Check the numbers of a known model type that determine its tokens and parameters. Raise EncoderError if one of
    them is invalid, or lists of its convolutions differ in length."""
    kind = str(config.get("model_type"))
    if kind not in KNOWN:
        return
    for name in (*SIZES, "mlp_ratio"):
        value, least = value_of(config, name), 0 if name == "num_register_tokens" else 1
        if value is not None and not (_is_integer(value, least) or name == "mlp_ratio" and 0 < number_of(config, name)):
            raise EncoderError(f"{name} of a {kind} must be a number from {least} to {MOST_SIZE}, is {value!r}")
    for name in SIDES:
        if value_of(config, name) is not None and not square(value_of(config, name)):
            raise EncoderError(f"{name} of a {kind} must be pixels, a whole number, is {value_of(config, name)!r}")
    lists = {name: value_of(config, name) for name in CONVOLUTIONS}
    for name, values in lists.items():
        if values is not None and not (isinstance(values, list) and values and all(map(_is_integer, values))):
            raise EncoderError(f"{name} of a {kind} must be a list of whole numbers above 0, is {values!r}")
    lengths = {name: len(values or ()) for name, values in lists.items()}
    if len(set(lengths.values())) > 1:
        raise EncoderError(f"the convolutions of a {kind} have lists of different lengths: {lengths}")


def number_of(config: Mapping[str, Any], *keys: str) -> float:
    """Return the first of these keys that has a value; 0 if there is none, or it is not a number in a sensible
    range."""
    value = next((number for key in keys if (number := value_of(config, key)) is not None), 0)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and 0 < value <= MOST_SIZE else 0


def size_of(config: Mapping[str, Any], *keys: str) -> int:
    """Return the result of `number_of` as an integer."""
    return int(number_of(config, *keys))


def _is_integer(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST_SIZE


def largest_dropout(config: Mapping[str, Any]) -> float:
    """Return the largest probability of dropout or masking in training."""
    entry = KNOWN.get(str(config.get("model_type")))
    every = {**(entry.defaults if entry else {}), **config}
    if config.get("apply_spec_augment") is False:
        every = {key: value for key, value in every.items() if not key.startswith("mask_")}
    rates = [value for key, value in every.items() if drops(key) and isinstance(value, int | float)]
    return max((float(rate) for rate in rates), default=0.0)


def drops(key: str) -> bool:
    """True if a key of a model's config is the probability of a dropout."""
    return any(word in key for word in DROPPED) and not key.startswith(("decoder_", "classifier_", "contrastive_"))


def square(size: Any) -> int:
    """Return the side in pixels of a processor's `size` or `crop_size`, or of a model's images or patches; 0 if it is
    not square or not one size."""
    if _is_integer(size):
        return int(size)
    if isinstance(size, list) and len(size) == 2 and size[0] == size[1]:
        return square(size[0])
    if not isinstance(size, Mapping):
        return 0
    if size.get("height") and size.get("height") == size.get("width"):
        return square(size["height"])
    return square(size.get("shortest_edge")) if set(size) <= {"shortest_edge"} else 0


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise EncoderError(f"no file {file}: give a directory as transformers saves it") from error
    except (OSError, ValueError, RecursionError) as error:
        raise EncoderError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise EncoderError(f"{file} is no JSON object")
    return content
