"""The interface of the specs of all encoder families, and the arithmetic of layers."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "relu", "silu")
"""Activation functions of encoders and projectors. `gelu_tanh` is the approximation by tanh."""

Grid = tuple[int, int] | tuple[int, int, int, float] | tuple[int, int, int, float, int, int]
"""Rows and columns of an image's tokens; of a video also its times, and the positions between two of them; with sound
also the tokens of sound between its own, and the position that the start and the end of the sound take: 1, or 0 if they
share that of the token in front and behind."""
GATED = "swiglu"
"""Activation of layers with a gated feed-forward block (Shazeer 2020, arXiv 2002.05202)."""


@dataclass(frozen=True)
class ImageTransform:
    """The preprocessing that turns an image into one of `EncoderSpec.input_size`."""

    interpolation: str = "bicubic"
    """`bicubic` or `bilinear`, both with antialiasing."""
    shortest_edge: int = 0
    """Pixels of the shorter side before the center crop; 0: no crop, both sides are resized."""
    tile: int = 0
    """Side in pixels of the tiles that the image is cut into; 0: no tiles."""
    background: tuple[int, int, int] = (0, 0, 0)
    """Color (red, green, blue) of the square around an image that is not cut into tiles when others are."""
    rounded: bool = True
    """True if resized pixels are rounded to integers (uint8); otherwise they are float32, from 0 to 255."""


class Merging(Protocol):
    """The properties of a projector that the arithmetic of an encoder needs."""

    merge: int
    """See `encoders.projectors.spec.ProjectorSpec`."""
    newline: bool
    """See `encoders.projectors.spec.ProjectorSpec`."""

    @property
    def latents(self) -> int:
        """See `encoders.projectors.spec.ProjectorSpec.latents`."""


class EncoderSpec(ABC):
    """The interface of every encoder's spec, with defaults for properties that most encoders lack.

    `extent0` and `extent1` come from the header of an image or audio item: height and width in pixels, or samples and
    samples per second. Everything is a pure function of the spec, so data (placeholders), `mimo-train check` and the
    pipeline (message shapes) agree without the model. Attributes without an annotation are properties of a family. If
    the user may choose one, the family has a field of that name.
    """

    if TYPE_CHECKING:  # fields of derived dataclasses
        name: str
        family: str

        @property
        def hidden_size(self) -> int: ...
        @property
        def dropout(self) -> float: ...

    kind: ClassVar[str] = ""
    """Kind of media that this encoder reads: `image` or `audio`."""
    medium: ClassVar[str] = ""
    """Name of one item in messages."""
    placeholder: ClassVar[str] = ""
    """Marker of an item in a record's text."""

    resize = ""
    """The way images are resized; `tiles`: they are cut into tiles (`encoders.native.vit.tiles`)."""
    rotary_positions = False
    """True if queries and keys are rotated by position."""
    bidirectional = ""
    """Tokens of the language model that see each other: `items`: those of one item; `prefix`: all before the first
    answer. Empty: none, attention is causal."""
    adds_features = False
    """True if features are added to the embeddings of their tokens, instead of replacing them."""
    deepstack: Sequence[int] = ()
    """Layers whose states the first layers of the language model get too (DeepStack)."""
    sound = False
    """True if the sound of videos is read too; the extent of a video with sound ends with its milliseconds of sound."""
    reads_videos = False
    """True if a video is one item, whose extent is (height, width, frames, numerator and denominator of the frames per
    second); false: its frames are images."""

    @property
    def parts(self) -> Mapping[str, Any]:
        """The layered encoders in this one, by name; a single encoder has the empty name."""
        return {"": self}

    @property
    def sizes_vary(self) -> bool:
        """True if items differ in their number of tokens."""
        return False

    @property
    def leading_tokens(self) -> int:
        """Tokens of each item before its patches, inside the encoder."""
        return 0

    @property
    def kept_tokens(self) -> int:
        """Tokens of each item before its patches, in the sequence."""
        return 0

    @property
    def largest_area(self) -> int:
        """Pixels of the largest image that layers see; 0: unknown."""
        return 0

    @property
    def transform(self) -> ImageTransform:
        """The preprocessing that turns an image into one of `input_size`."""
        return ImageTransform()

    @property
    def is_tiled(self) -> bool:
        """True if images are cut into tiles."""
        return self.resize == "tiles"

    @abstractmethod
    def input_size(self, extent0: int, extent1: int, /, *, merge: int = 1) -> tuple[int, ...]:
        """Return the size in which the encoder gets an item: (height, width) in pixels, or (samples, samples per
        second). Raise EncoderError for an unsupported extent."""

    @abstractmethod
    def inner_tokens(self, extent0: int, extent1: int, /, *, merge: int = 1) -> int:
        """Return the tokens of an item inside the encoder. Raise EncoderError as `input_size` does."""

    @abstractmethod
    def num_tokens(self, extent0: int, extent1: int, /, *, merge: int = 1) -> int:
        """Return the tokens of an item in the sequence. Raise EncoderError as `input_size` does."""

    @abstractmethod
    def joined(self, merge: int) -> int:
        """Return the number of tokens inside the encoder that make one of the sequence."""

    @abstractmethod
    def most_tokens(self, merge: int = 1) -> int:
        """Return the tokens in the sequence of the largest item."""

    @abstractmethod
    def most_inner_tokens(self, merge: int = 1) -> int:
        """Return the tokens inside the encoder of the largest item."""

    @abstractmethod
    def describe_input(self, merge: int) -> tuple[str, str, str]:
        """Return descriptions of an item's input, of its tokens inside the layers, and of its tokens in the
        sequence."""

    @abstractmethod
    def faults(self) -> list[tuple[str, str]]:
        """Return (field, message) of every config error."""

    @abstractmethod
    def joint_faults(self, merge: int) -> list[tuple[str, str]]:
        """Return (field of the module, message) of every config error together with a projector."""

    @abstractmethod
    def num_parameters(self) -> int:
        """Return the number of parameters, biases and norms included."""

    def token_grid(self, extent0: int, extent1: int, /, *, merge: int = 1) -> Grid | None:
        """Return the grid of an item's tokens in the sequence; None if there is none."""
        return None

    def attention_pairs(self, extent0: int, extent1: int, /, *, merge: int = 1) -> int:
        """Return the number of token pairs of an item that attend to each other, averaged over layers: by default
        all."""
        return self.inner_tokens(extent0, extent1, merge=merge) ** 2

    def most_features(self, merge: int = 1) -> int:
        """Return the features of the largest item before the projector."""
        return self.most_tokens(merge)

    def patches_of(self, tokens: float, merge: int = 1) -> float:
        """Return the total patches or frames of items that take `tokens` in the sequence."""
        return tokens * self.joined(merge)

    def joined_width(self, merge: int) -> int:
        """Return the width of the projector's input: all features of a token, side by side."""
        return self.hidden_size * self.joined(merge)


class LayeredSpec(EncoderSpec):
    """The spec of an encoder whose layers are built here, so that tensor and pipeline parallelism can split them."""

    if TYPE_CHECKING:
        num_layers: int
        num_attention_heads: int
        ffn_hidden_size: int
        layernorm_epsilon: float
        activation: str
        init_std: float

    normalization = "LayerNorm"
    feature_layer = -1
    """The layer whose output is read, counted from the last one; layers after it are not built."""
    final_norm = True
    """True if a norm follows the layers."""
    key_bias = True
    layer_scale = 0.0
    """Initial factor of the learned scale after attention and feed-forward block; 0: none."""
    full_attention: Sequence[int] | None = None
    """Layers, counted from 0, that attend to the whole item, while others attend inside windows; None: all."""

    @property
    def built_layers(self) -> int:
        """Number of layers up to the one that is read."""
        return self.num_layers + 1 + self.feature_layer

    @property
    @abstractmethod
    def token_unit_fields(self) -> tuple[str, ...]:
        """Fields of the module that determine `token_unit`."""

    @abstractmethod
    def token_unit(self, merge: int = 1) -> int:
        """Return a divisor of the number of tokens of any item inside the encoder."""

    @abstractmethod
    def embedding_products(self) -> dict[str, int]:
        """Return {weight before the layers: its multiplications for one token inside}."""

    def layer_faults(self) -> list[tuple[str, str]]:
        """Return (field, message) of every wrong layer size."""
        faults, heads, layers = [], self.num_attention_heads, self.num_layers
        if self.hidden_size % heads:
            text = f"{heads} does not divide hidden_size {self.hidden_size}: change one of them"
            faults.append(("num_attention_heads", text))
        if self.normalization not in ("LayerNorm", "RMSNorm"):
            faults.append(("normalization", f"must be LayerNorm or RMSNorm, is {self.normalization!r}"))
        choices = (*ACTIVATIONS, GATED)
        if self.activation not in choices:
            faults.append(("activation", f"must be one of {', '.join(choices)}, is {self.activation!r}"))
        if not -layers <= self.feature_layer <= -1:
            text = f"must be from -{layers} (of num_layers {layers}) to -1, is {self.feature_layer}"
            faults.append(("feature_layer", text))
        return faults

    @property
    def norm_parameters(self) -> int:
        """Trainable parameters of one norm."""
        return self.hidden_size * (2 if self.normalization == "LayerNorm" else 1)

    @property
    def layer_parameters(self) -> int:
        """Trainable parameters of one layer, biases and norms included."""
        scale = 2 * self.hidden_size if self.layer_scale else 0
        return self.split_parameters + 2 * self.hidden_size + 2 * self.norm_parameters + scale

    @property
    def split_parameters(self) -> int:
        """Parameters of one layer that tensor parallelism divides: matrices, and biases of matrices cut by outputs."""
        hidden, ffn = self.hidden_size, self.ffn_hidden_size
        up = 2 * ffn if self.activation == GATED else ffn
        return 4 * hidden * hidden + 3 * hidden + hidden * up + up + ffn * hidden


def num_tokens(encoder: EncoderSpec, projector: Merging, *extent: int) -> int:
    """Return the tokens of an item in the language model's sequence. Raise EncoderError as `EncoderSpec.input_size`."""
    tokens = encoder.num_tokens(*extent, merge=projector.merge)
    return projector.latents or tokens


def most_tokens(encoder: EncoderSpec, projector: Merging) -> int:
    """Return the tokens of the largest item in the language model's sequence."""
    return projector.latents or encoder.most_tokens(projector.merge)


def token_grid(encoder: EncoderSpec, projector: Merging, *extent: int) -> Grid | None:
    """Return `EncoderSpec.token_grid`, in row order. Return None if the tokens form no grid: for audio, for latents of
    a resampler, and after a class token."""
    grid = None if projector.latents else encoder.token_grid(*extent, merge=projector.merge)
    return grid if grid and math.prod(grid[:3]) == num_tokens(encoder, projector, *extent) else None


def joint_faults(encoder: EncoderSpec, projector: Merging) -> list[tuple[str, str]]:
    """Return (field of the module, message) of every config error of an encoder together with a projector."""
    faults, tiled = encoder.joint_faults(projector.merge), encoder.is_tiled
    if tiled and projector.latents:
        text = f"is {projector.latents}, and with encoder.resize tiles an image has lines of features: set it to 0"
        faults.append(("projector.resampler.latents", text))
    if tiled != projector.newline:
        text = f"encoder.resize {encoder.resize or 'of another kind'} "
        text += "has rows behind lines: set it to true" if tiled else "has no lines in the sequence: set it to false"
        faults.append(("projector.newline", f"is {str(projector.newline).lower()}, and {text}"))
    return faults
