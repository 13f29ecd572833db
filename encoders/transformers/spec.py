"""Sizes of a model of `transformers`, read from its directory when the config is composed."""

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

from encoders.base import ImageTransform
from encoders.errors import EncoderError
from encoders.key_rules import MOST_LAYERS, MOST_PIXELS, MOST_WIDTH, FixedKeys, key
from encoders.plain.spec import AudioSpec, ImageSpec
from encoders.pretrained import RESAMPLE
from encoders.transformers.directory import (
    KNOWN,
    largest_dropout,
    number_of,
    preprocessing,
    require_sizes,
    resample,
    size_of,
    square,
    tower_config,
    value_of,
)

WEIGHTS = ("load", "random")
WHISPER_HOP, WHISPER_STRIDE = 160, 2
"""Samples between windows of Whisper's spectrogram, and windows per feature."""


@dataclass
class FromDirectory(FixedKeys):
    """Base of the image and audio specs: the model's config, from the directory or from a saved config."""

    path: str = ""
    """Directory of the model, or of a model with a `vision_config` or `audio_config`."""
    weights: str = "load"
    """`load`: start from the weights of the directory. `random`: from random ones."""
    hidden_state: int | None = key(None, at_least=-MOST_LAYERS, at_most=MOST_LAYERS)
    """Index of the `hidden_states` that are the features, such as -2; not set: `last_hidden_state`."""
    hidden_size: int = key(0, at_least=0, at_most=MOST_WIDTH)
    """Width of the features; 0: from `config.json`."""
    dropout: float = key(-1.0, at_least=-1, below=1)
    """Largest dropout probability of any kind; -1: from `config.json`; 0: none, and no masking."""
    model_config: dict[str, Any] = field(default_factory=dict)
    """Config of the model; empty: read from the directory. It is saved with the run, so that checkpoints need no
    directory."""

    KIND: ClassVar[str]
    PART: ClassVar[str]

    def __post_init__(self) -> None:
        # `faults` reports an unreadable directory with its key.
        with suppress(EncoderError):
            self._filled()

    def layers(self) -> int:
        """Return the number of layers of the encoder; 0 if unknown."""
        return size_of(self.model_config, "num_hidden_layers", "encoder_layers")

    def own_faults(self) -> list[tuple[str, str]]:
        """Return (field, message) of every error of the directory and the keys about it."""
        try:
            self._filled()
        except EncoderError as error:
            return [("path" if self.path or not self.model_config else "model_config", str(error))]
        model_type = str(self.model_config.get("model_type"))
        entry = KNOWN.get(model_type)
        if entry and entry.kind != self.KIND:
            other = {"image": "transformers", "audio": "transformers_audio"}[entry.kind]
            return [("family", f"{model_type} of {self.path or 'model_config'} reads {entry.kind}: use family {other}")]
        faults = []
        if self.weights not in WEIGHTS:
            faults.append(("weights", f"must be {' or '.join(WEIGHTS)}, is {self.weights!r}"))
        if self.weights == "load" and not self.path:
            faults.append(("path", "is empty: give the directory of the weights, or set weights=random"))
        if not self.hidden_size:
            faults.append(("hidden_size", f"is not known of a {model_type}: give the width of its features"))
        dropout = largest_dropout(self.model_config)
        if self.dropout not in (0, dropout):
            faults.append(
                ("dropout", f"is {self.dropout:g}: give -1 (as config.json says, {dropout:g}), or 0 for none")
            )
        layers = self.layers()
        if self.hidden_state is not None and layers and not -layers - 1 <= self.hidden_state <= layers:
            faults.append(
                ("hidden_state", f"{layers} layers have states {-layers - 1} to {layers}, not {self.hidden_state}")
            )
        return faults

    def transformer_parameters(self, width: int, ffn: int) -> int:
        """Return the approximate parameters of the layers: attention, feed-forward and norms, with biases."""
        return self.layers() * (4 * width * width + 2 * width * ffn + 9 * width + ffn)

    def activations(self) -> int:
        """Return roughly how many numbers the backward pass of the largest item keeps. In each layer these are inputs
        and outputs of norms, the attention's, and two of the feed-forward width for every token."""
        ffn = size_of(self.model_config, "intermediate_size") or 4 * self.hidden_size
        return self.layers() * self._most_inside() * (9 * self.hidden_size + 2 * ffn)

    def attention_width(self) -> int:
        return self.layers() * self.hidden_size

    def _most_inside(self) -> int:
        raise AssertionError("images and clips say it")

    def _filled(self) -> None:
        """Fill in the values of the directory. Raise EncoderError if it cannot be read or contradicts
        `model_config`."""
        try:
            self._fill()
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            if isinstance(error, EncoderError):
                raise
            what = f"{self.path}/config.json" if self.path else "model_config"
            raise EncoderError(f"{what} is damaged, a value is none ({error!r}): copy it again") from error

    def _fill(self) -> None:
        if self.path:
            try:
                read = tower_config(self.path, self.PART)
            except EncoderError:
                # A checkpoint resumes without the directory: its config is complete.
                if not self.model_config:
                    raise
                read = dict(self.model_config)
            if self.model_config and read != self.model_config:
                keys = sorted({*read, *self.model_config})
                other = [key for key in keys if read.get(key) != self.model_config.get(key)]
                raise EncoderError(
                    f"{self.path}/config.json and encoder.model_config differ in {', '.join(other)}: remove "
                    "model_config, which is for a run without the directory"
                )
            self.model_config = read
        if not self.model_config.get("model_type"):
            raise EncoderError("give the directory of a model as transformers saves it")
        config = self.model_config
        require_sizes(config)
        self.hidden_size = self.hidden_size or size_of(config, "hidden_size", "d_model")
        if self.dropout < 0:
            self.dropout = largest_dropout(config)


@dataclass
class TransformersSpec(FromDirectory, ImageSpec):
    """A vision model of `transformers` as it is. Keys that are not set come from its directory: `config.json`,
    `preprocessor_config.json` or `processor_config.json`."""

    name: str = "transformers"
    family: str = "transformers"
    keep_prefix: bool = False
    """Keep the tokens before the patches (class token, registers) as features. Needs `projector.merge` 1."""
    prefix_tokens: int = key(-1, at_least=-1, at_most=2**16)
    """Tokens before the patches; -1: known from the model type."""
    patch_size: int = key(0, at_least=0, at_most=MOST_PIXELS)
    """Side in pixels of the square that a feature stands for; 0: from `config.json`, for known types."""
    tokens: int = key(0, at_least=0, at_most=2**24)
    """Features of an image, for models without a patch grid; 0: there is a grid."""
    image_size: int = key(0, at_least=0, at_most=MOST_PIXELS)
    """Side in pixels that images are resized to; 0: from the preprocessing config."""
    interpolation: str = ""
    """`bicubic` or `bilinear`; empty: from the preprocessing config (`resample`)."""
    pixel_scale: float = key(0.0, at_least=0, at_most=1e6)
    """Factor of pixels, 0 to 255; 0: from the preprocessing config."""
    pixel_mean: list[float] = key(factory=list, at_least=-1e6, at_most=1e6)
    """Mean per channel of scaled pixels; empty: from the preprocessing config."""
    pixel_std: list[float] = key(factory=list, above=0, at_most=1e6)
    """Standard deviation per channel of scaled pixels; empty: from the preprocessing config."""

    builder: ClassVar[str] = "encoders.transformers.model:VisionTower"
    KIND: ClassVar[str] = "image"
    PART: ClassVar[str] = "vision_config"

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return (rows, columns) of features: patches, or one row of `tokens`."""
        if self.tokens:
            return 1, self.tokens
        if self.patch_size < 1:
            return 0, 0
        rows, columns = height // self.patch_size, width // self.patch_size
        return (1, rows * columns + max(self.prefix_tokens, 0)) if self.keep_prefix else (rows, columns)

    @property
    def transform(self) -> ImageTransform:
        # As in its processor: only DINOv3's keeps fractions of resized pixels.
        return ImageTransform(self.interpolation, rounded=self.model_config.get("model_type") != "dinov3_vit")

    def dropped_tokens(self) -> int:
        """Return the number of tokens removed from the front of the model's output."""
        return 0 if self.keep_prefix else max(self.prefix_tokens, 0)

    def num_parameters(self) -> int:
        """Return the approximate number of parameters: that of a vision transformer of these sizes."""
        config, width = self.model_config, self.hidden_size
        ffn = int(width * number_of(config, "mlp_ratio")) or size_of(config, "intermediate_size") or 4 * width
        own_size, patch = square(value_of(config, "image_size")), square(value_of(config, "patch_size"))
        embeddings = 3 * patch**2 * width + (own_size // patch) ** 2 * width if patch else 0
        return self.transformer_parameters(width, ffn) + embeddings + 4 * width

    def notes(self) -> list[str]:
        """Return the differences from the directory's preprocessing."""
        with suppress(EncoderError):
            preprocessor = preprocessing(self.path, self.KIND) if self.path else {}
            if preprocessor.get("do_center_crop"):
                return [
                    f"images are resized to {self.image_size} x {self.image_size} whole, where {self.path} resizes "
                    "the shorter side and crops the middle"
                ]
        return []

    def faults(self) -> list[tuple[str, str]]:
        faults = self.own_faults()
        if faults:
            return faults
        model_type = self.model_config["model_type"]
        if not self.image_size:
            faults.append(
                ("image_size", f"{self.path or 'model_config'} does not say one square size: give it in pixels")
            )
        if self.interpolation not in RESAMPLE.values():
            is_given = f"is {self.interpolation!r}" if self.interpolation else f"{self.path} has another resample"
            faults.append(("interpolation", f"{is_given}: set {' or '.join(RESAMPLE.values())}"))
        for name, zero in (("pixel_scale", 0.0), ("pixel_mean", []), ("pixel_std", [])):
            if getattr(self, name) == zero:
                faults.append((name, f"{self.path or 'model_config'} has no preprocessing that says it: give it"))
        if self.tokens and self.patch_size:
            faults.append(("tokens", f"is {self.tokens}, and patch_size {self.patch_size}: give one of the two"))
        if not self.tokens and self.patch_size < 1:
            faults.append(
                (
                    "patch_size",
                    f"the features of a {model_type} are not known by formula: give patch_size, the pixels of a side "
                    "that one feature stands for, or tokens, their number",
                )
            )
        if self.prefix_tokens < 0:
            faults.append(("prefix_tokens", f"is not known of a {model_type}: give the tokens in front of the patches"))
        if not faults and not self.tokens and self.image_size % self.patch_size:
            faults.append(
                (
                    "image_size",
                    f"patches of {self.patch_size} do not divide {self.image_size} pixels: change one of them",
                )
            )
        return faults or super().faults()

    def _most_inside(self) -> int:
        return self.most_inner_tokens() + self.dropped_tokens()

    def _fill(self) -> None:
        super()._fill()
        config = self.model_config
        entry = KNOWN.get(config["model_type"])
        if entry and entry.kind == self.KIND:
            if not self.tokens:
                self.patch_size = self.patch_size or square(value_of(config, "patch_size"))
            if self.prefix_tokens < 0:
                self.prefix_tokens = entry.prefix + size_of(config, "num_register_tokens")
        preprocessor = preprocessing(self.path, self.KIND) if self.path else {}
        size = preprocessor.get("crop_size") if preprocessor.get("do_center_crop") else preprocessor.get("size")
        self.image_size = self.image_size or square(size) or square(value_of(config, "image_size"))
        self.interpolation = self.interpolation or RESAMPLE.get(resample(preprocessor), "")
        if not preprocessor:
            return
        scales, normalises = preprocessor.get("do_rescale", True), preprocessor.get("do_normalize", True)
        self.pixel_scale = self.pixel_scale or (float(preprocessor.get("rescale_factor", 1 / 255)) if scales else 1.0)
        for name, theirs, none in (("pixel_mean", "image_mean", 0.0), ("pixel_std", "image_std", 1.0)):
            values = preprocessor.get(theirs) if normalises else [none] * 3
            if not getattr(self, name) and values is not None:
                setattr(self, name, [float(value) for value in values])


@dataclass
class TransformersAudioSpec(FromDirectory, AudioSpec):
    """An audio model of `transformers` as it is: Whisper's encoder, or one of raw sound such as Wav2Vec2, HuBERT and
    WavLM. Keys that are not set come from its directory: `config.json` and `preprocessor_config.json`."""

    name: str = "transformers_audio"
    family: str = "transformers_audio"
    sample_rate: int = key(0, at_least=0, at_most=2**20)
    """Samples per second that audio is resampled to; 0: from the preprocessing config."""
    normalize: bool | None = None
    """Normalise audio to mean 0 and variance 1; not set: from the preprocessing config."""

    builder: ClassVar[str] = "encoders.transformers.model:AudioTower"
    KIND: ClassVar[str] = "audio"
    PART: ClassVar[str] = "audio_config"

    @property
    def sizes_vary(self) -> bool:
        """True if audio items differ in their number of tokens."""
        return not self.is_whisper

    @property
    def is_whisper(self) -> bool:
        """True if audio is padded to one length, and read as a spectrogram."""
        return self.model_config.get("model_type") == "whisper"

    def input_size(self, samples: int, rate: int, /, *, merge: int = 1) -> tuple[int, int]:
        """Return the encoder's input size, see `AudioSpec.input_size`. Whisper pads every audio item to its longest
        length."""
        size = super().input_size(samples, rate, merge=merge)
        return (self.shortest(self._whisper_tokens), self.sample_rate) if self.is_whisper else size

    def tokens(self, samples: int) -> int:
        """Return the features of audio of this many samples, after the convolutions."""
        if self.is_whisper:
            return samples // (WHISPER_HOP * WHISPER_STRIDE)
        for kernel, stride in self._convolutions():
            samples = max(0, (samples - kernel) // stride + 1)
        return samples

    def shortest(self, tokens: int) -> int:
        if self.is_whisper:
            return tokens * WHISPER_HOP * WHISPER_STRIDE
        for kernel, stride in reversed(self._convolutions()):
            tokens = (tokens - 1) * stride + kernel
        return tokens

    def num_parameters(self) -> int:
        """Return the approximate number of parameters: convolutions, positions and layers."""
        config, width = self.model_config, self.hidden_size
        if self.is_whisper:
            mels = size_of(config, "num_mel_bins")
            front = 3 * mels * width + 3 * width**2 + self._whisper_tokens * width
            return front + self.transformer_parameters(width, size_of(config, "encoder_ffn_dim"))
        widths = [1, *value_of(config, "conv_dim")]
        front = sum(a * b * kernel for a, b, (kernel, _) in zip(widths, widths[1:], self._convolutions(), strict=False))
        positions = width * (width // 16) * 128
        ffn = size_of(config, "intermediate_size")
        return front + widths[-1] * width + positions + self.transformer_parameters(width, ffn)

    def faults(self) -> list[tuple[str, str]]:
        faults = self.own_faults()
        if faults:
            return faults
        model_type = self.model_config["model_type"]
        if not self.is_whisper and not self._convolutions():
            audio_types = [name for name, entry in KNOWN.items() if entry.kind == "audio"]
            return [
                (
                    "path",
                    f"the features of a {model_type} are not known by formula: use one of {', '.join(audio_types)}",
                )
            ]
        if not self.sample_rate:
            faults.append(("sample_rate", f"{self.path or 'model_config'} does not say it: give samples per second"))
        if self.normalize is None:
            faults.append(("normalize", f"{self.path or 'model_config'} does not say it: give true or false"))
        if self.is_whisper and self.sample_rate:
            longest = self.shortest(self._whisper_tokens) / self.sample_rate
            if self.max_seconds > longest:
                faults.append(("max_seconds", f"is {self.max_seconds:g}, and the model reads {longest:g} s: lower it"))
        return faults or super().faults()

    def joint_faults(self, merge: int) -> list[tuple[str, str]]:
        if self.is_whisper and self._whisper_tokens % merge:
            return [("projector.merge", f"{merge} does not divide the {self._whisper_tokens} features of every clip")]
        return []

    @property
    def _whisper_tokens(self) -> int:
        return size_of(self.model_config, "max_source_positions")

    def _convolutions(self) -> list[tuple[int, int]]:
        kernels, strides = (value_of(self.model_config, f"conv_{name}") or [] for name in ("kernel", "stride"))
        return list(zip(kernels, strides, strict=True))

    def _most_inside(self) -> int:
        return self.most_inner_tokens()

    def _fill(self) -> None:
        super()._fill()
        preprocessor = preprocessing(self.path, self.KIND) if self.path else {}
        self.sample_rate = self.sample_rate or int(preprocessor.get("sampling_rate", 0))
        if self.is_whisper:
            self.normalize = bool(self.normalize)
        elif self.normalize is None and preprocessor:
            self.normalize = bool(preprocessor.get("do_normalize", True))
