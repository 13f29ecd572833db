"""Items of an encoder of `transformers` alone, by its own image processor or feature extractor, and their number of
features."""

import inspect
import json
from functools import cache, lru_cache
from threading import Lock
from typing import Any, cast

import torch
from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoModel, PretrainedConfig, PreTrainedModel

from encoders.errors import EncoderError
from encoders.transformers_media.directory import hf_config, without_language
from encoders.transformers_media.processor import silence_and_tone
from encoders.transformers_media.spec import default_max_seconds
from encoders.transformers_media.tensors import Tensors

KINDS = {"pixel_values": "image", "input_values": "audio", "input_features": "audio"}
"""Kind of media by the main input of a class."""

PREFIXES = {"deit": 2, "siglip_vision_model": 0, "ijepa": 0} | dict.fromkeys(
    ("clip_vision_model", "dinov2", "dinov2_with_registers", "dinov3_vit", "vit", "vit_msn", "beit"), 1
)
"""Tokens before the patches, without registers, by model type."""

RATES = ("dropout", "layerdrop", "drop_path_rate", "mask_time_prob", "mask_feature_prob")
"""Parts of the names of keys that set a probability of dropout or masking in training."""

DTYPES = {"image": torch.uint8, "audio": torch.float32}
"""Dtype of items."""

SIZES = ((336, 336), (1024, 1024), (512, 1024), (1024, 512))
"""Sizes of images of which the largest is taken, (height, width)."""


def tower_config(path: str) -> PretrainedConfig:
    """Return the config of a directory's encoder: its `vision_config` or `audio_config`, if any, else all."""
    config = hf_config(path)
    parts = (getattr(config, name, None) for name in ("vision_config", "audio_config"))
    return next((part for part in parts if isinstance(part, PretrainedConfig)), config)


def rates_of(config: PretrainedConfig) -> dict[str, float]:
    """Return the probabilities of dropout and of masking in training, by key."""
    is_masked = getattr(config, "apply_spec_augment", True)
    return {
        name: float(value)
        for name, value in vars(config).items()
        if any(word in name for word in RATES) and isinstance(value, int | float)
        if not name.startswith(("decoder_", "classifier_", "contrastive_")) and (is_masked or name[:5] != "mask_")
    }


def tower(config: PretrainedConfig) -> PreTrainedModel:
    """Return an encoder with random weights. Raise EncoderError if transformers has none that takes images or audio
    alone."""
    try:
        built = AutoModel._model_mapping[type(config)]
    except KeyError as error:
        raise EncoderError(f"transformers has no model for the type {config.model_type}") from error
    model = (built[0] if isinstance(built, tuple) else built)._from_config(config)
    model = without_language(model) if config.is_encoder_decoder else model
    parameters = inspect.signature(_encoder(model).forward).parameters.values()
    needed = [entry.name for entry in parameters if entry.default is entry.empty and entry.kind != entry.VAR_KEYWORD]
    if model.main_input_name not in KINDS or {*needed} - {model.main_input_name}:
        raise EncoderError(f"{type(model).__name__} takes {', '.join(needed)}, not images or audio alone")
    return cast(PreTrainedModel, model)


def _encoder(model: PreTrainedModel) -> Any:
    return model.get_encoder() if model.config.is_encoder_decoder else model


def states(model: PreTrainedModel, inputs: torch.Tensor, hidden_state: int | None) -> torch.Tensor:
    """Return `last_hidden_state`, or the chosen one of `hidden_states`: [N, T, H], or feature maps [N, H, rows,
    columns]."""
    encoder, arguments = _encoder(model), {model.main_input_name: inputs, "return_dict": True}
    if "interpolate_pos_encoding" in inspect.signature(encoder.forward).parameters:
        arguments["interpolate_pos_encoding"] = _pair(model.config.image_size) != [*inputs.shape[-2:]]
    output = encoder(**arguments, output_hidden_states=hidden_state is not None)
    return cast(torch.Tensor, output.last_hidden_state if hidden_state is None else output.hidden_states[hidden_state])


def _pair(size: Any) -> list[int]:
    return [*size] if isinstance(size, list | tuple) else [size, size]


class TowerTensors(Tensors):
    """An encoder on the meta device, as `model`."""

    def __init__(self, path: str):
        with torch.device("meta"):
            model = tower(tower_config(path))
        super().__init__(model)
        self.model = model.eval()
        self.shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}


@cache
def tensors_of_tower(path: str) -> TowerTensors:
    """Return the structure of a directory's encoder. Raise EncoderError if it has none."""
    return TowerTensors(path)


class TowerReader:
    """The image processor or feature extractor of a directory. Thread-safe.

    Attributes:
        sample_rate: samples per second of audio; 0 for images.
        dropout: largest probability of dropout or masking in config.json.
        identity: text that changes with what determines the tokens of an item.
        sizes: sizes of items that are tried.
        has_one_size: True if all items have as many features.
        width: width of the features.
    """

    def __init__(self, path: str, kind: str, hidden_state: int | None, image_size: int, dropped: int):
        """Load the processor.

        Args:
            image_size: side in pixels of the square that images are resized to; 0: the processor's.
            dropped: tokens at the front that are no features.

        Raises:
            EncoderError: the directory has no such encoder, or no processor for it.
        """
        auto = AutoImageProcessor if kind == "image" else AutoFeatureExtractor
        try:
            self._processor = auto.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # processors raise errors of many classes
            reason = str(error).strip().partition("\n")[0]
            raise EncoderError(f"cannot load the {auto.__name__[4:]} of {path}: {reason}") from error
        self._model, config = tensors_of_tower(path).model, tower_config(path)
        self._input = self._model.main_input_name
        if KINDS[self._input] != kind:
            raise EncoderError(f"the {config.model_type} of {path} reads no {kind}")
        self.kind, self._hidden_state, self._dropped, self._lock = kind, hidden_state, dropped, Lock()
        self._options: dict[str, Any] = {"return_tensors": "pt"}
        if image_size:
            square = {"height": image_size, "width": image_size}
            self._options |= {"size": square, "do_center_crop": False}
        self.sample_rate = 0 if kind == "image" else int(self._processor.sampling_rate)
        self._options |= {} if kind == "image" else {"sampling_rate": self.sample_rate}
        self.dropout = max(rates_of(config).values(), default=0.0)
        self.identity = json.dumps([config.to_json_string(), str(self._processor), hidden_state, image_size, dropped])
        self._shape_of, self._features_of = lru_cache(2**16)(self._empty_shape), lru_cache(2**12)(self._features)
        self.sizes = SIZES if kind == "image" else ((self.sample_rate, self.sample_rate), (10**6, self.sample_rate))
        self.has_one_size = len({self._shape_of(*size) for size in self.sizes}) == 1

    @property
    def width(self) -> int:
        """Width of the features. Raise EncoderError as `rows` does."""
        return self._of_size(*self.sizes[0])[-1]

    def rows(self, extent0: int, extent1: int) -> int:
        """Return the number of features of an item.

        Args:
            extent0, extent1: height and width in pixels, or samples and samples per second.

        Raises:
            EncoderError: the processor or the model cannot process an item of this size.
        """
        tokens, _, _ = self._of_size(extent0, extent1)
        return tokens - self._dropped

    def grid(self, height: int, width: int) -> tuple[int, int] | None:
        """Return (rows, columns) of the features of an image; None if they form no grid. Raise EncoderError as `rows`
        does."""
        tokens, grid, _ = self._of_size(height, width)
        return grid if grid and grid[0] * grid[1] == tokens - self._dropped else None

    def length(self, samples: int, rate: int) -> int:
        """Return the samples of audio at the extractor's rate."""
        return -(-samples * self.sample_rate // rate)

    def cuts(self, seconds: float) -> bool:
        """True if the extractor leaves out the end of audio of this length."""
        silence, tone = silence_and_tone(self.length(int(seconds * 1000), 1000), self.sample_rate)
        return self._process(silence).equal(self._process(tone))

    def read(self, item: torch.Tensor) -> dict[str, Any]:
        """Return the tensor that the model gets of an item, the number of its features as `rows`, and their `grid`.

        Args:
            item: uint8 [3, height, width], or float32 [samples] at `sample_rate`.
        """
        inputs = self._process(item)
        tokens, grid, _ = self._features_of(tuple(inputs.shape))
        return {self._input: inputs, "rows": tokens - self._dropped, "grid": grid}

    def _process(self, item: torch.Tensor) -> torch.Tensor:
        if self.kind == "image":
            inputs = self._processor(images=[item], **self._options)
        else:
            inputs = self._processor(item.numpy(), **self._options)
        if self._input not in inputs:
            raise EncoderError(f"{type(self._processor).__name__} returns no {self._input}")
        return cast(torch.Tensor, inputs[self._input])

    def _empty_shape(self, extent0: int, extent1: int) -> tuple[int, ...]:
        reason: Exception | None = None
        # On the meta device no pixel is computed; some processors look at them.
        for device in ("meta", "cpu") if self.kind == "image" else ("cpu",):
            size = (3, extent0, extent1) if self.kind == "image" else (self.length(extent0, extent1),)
            try:
                return tuple(self._process(torch.zeros(size, dtype=DTYPES[self.kind], device=device)).shape)
            except Exception as error:
                reason = error
        raise EncoderError(f"{type(self._processor).__name__} cannot process it: {reason}") from reason

    def _of_size(self, extent0: int, extent1: int) -> tuple[int, tuple[int, int] | None, int]:
        """Return number, (rows, columns) and width of the features of an item."""
        return self._features_of(self._shape_of(*(self.sizes[0] if self.has_one_size else (extent0, extent1))))

    def _features(self, shape: tuple[int, ...]) -> tuple[int, tuple[int, int] | None, int]:
        """Return number, (rows, columns) and width of the features of inputs [1, ...]."""
        length = getattr(self._model, "_get_feat_extract_output_lengths", None)
        if self._input == "input_values" and length is not None and shape[1] != self.sample_rate:
            _, _, width = self._features_of((1, self.sample_rate))
            return int(length(shape[1])), None, width
        try:
            with self._lock, torch.no_grad():
                state = states(self._model, torch.empty(shape, device="meta"), self._hidden_state)
        except Exception as error:  # a class may raise anything
            raise EncoderError(f"{type(self._model).__name__} cannot process {[*shape]}: {error}") from error
        if state.dim() == 4:
            _, width, *grid = state.shape
            return grid[0] * grid[1], (grid[0], grid[1]), width
        _, tokens, width = state.shape
        patch = getattr(self._model.config, "patch_size", None)
        if len(shape) != 4 or patch is None:
            return tokens, None, width
        rows, columns = (side // size for side, size in zip(shape[2:], _pair(patch), strict=True))
        return tokens, (rows, columns), width


@cache
def reader_of(path: str, kind: str, hidden_state: int | None, image_size: int = 0, dropped: int = 0) -> TowerReader:
    """Return the processor of a directory, which is loaded once. Arguments and errors as for `TowerReader`."""
    return TowerReader(path, kind, hidden_state, image_size, dropped)


def tower_keys(path: str) -> dict[str, Any]:
    """Return the keys of the spec of a directory's encoder. Raise EncoderError if it has none that can be read."""
    config, tensors = tower_config(path), tensors_of_tower(path)
    kind = KINDS[tensors.model.main_input_name]
    reader = reader_of(path, kind, None)
    keys = {
        "name": f"{config.model_type} as it is",
        "family": f"tower_{'images' if kind == 'image' else kind}",
        "path": path,
        "hidden_size": reader.width,
        "parameters": tensors.num_parameters,
        "layers": getattr(config, "num_hidden_layers", 0),
        "dropout": reader.dropout,
    }
    if kind == "audio":
        keys["max_seconds"] = default_max_seconds(reader)
    else:
        known = PREFIXES.get(config.model_type, -1)
        rest = -1 if reader.grid(*SIZES[0]) is None else 0
        keys["prefix_tokens"] = rest if known < 0 else known + getattr(config, "num_register_tokens", 0)
    return keys
