"""The interface of the specs of all encoder families, and the arithmetic of layers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "relu", "silu")
"""Activation functions of encoders and projectors. `gelu_tanh` is the approximation by tanh."""

GATED = "swiglu"
"""The activation of layers of encoders whose feed-forward block is gated (Shazeer 2020, arXiv 2002.05202)."""


@dataclass(frozen=True)
class ImageTransform:
    """How an image becomes one of `EncoderSpec.input_size`."""

    interpolation: str = "bicubic"
    """`bicubic` or `bilinear`, both with antialiasing."""
    shortest_edge: int = 0
    """Pixels that the shorter side gets before the middle is cut out; 0: nothing is cut, both sides are resized to what
    they become."""
    tile: int = 0
    """Side in pixels of the tiles that it is cut into; 0: it is not."""
    background: tuple[int, int, int] = (0, 0, 0)
    """Of a square around an image that is not cut where others are: red, green, blue."""
    rounded: bool = True
    """Whether resized pixels are rounded to whole numbers (uint8); otherwise they are float32, from 0 to 255."""


class Merging(Protocol):
    """What the arithmetic of an encoder needs of the projector behind it."""

    merge: int
    """See `encoders.projectors.spec.ProjectorSpec`."""
    newline: bool
    """See `encoders.projectors.spec.ProjectorSpec`."""

    @property
    def latents(self) -> int:
        """See `encoders.projectors.spec.ProjectorSpec.latents`."""


class EncoderSpec(ABC):
    """The interface of every encoder's spec, with the defaults of what most encoders lack.

    `extent0` and `extent1` are read from the header of an image or audio item: height and width in pixels, or samples
    and samples per second. Everything is a pure function of the spec, so that data (placeholders), `mimo-train check`
    and the pipeline (message shapes) agree without the model. Attributes without an annotation are properties of a
    family; a family that lets the user choose has a field of that name.
    """

    if TYPE_CHECKING:  # fields of the dataclasses that derive from it
        name: str
        family: str

        @property
        def hidden_size(self) -> int: ...
        @property
        def dropout(self) -> float: ...

    kind: ClassVar[str] = ""
    """Kind of media this encoder reads: `image` or `audio`."""
    medium: ClassVar[str] = ""
    """What one item of it is called."""
    placeholder: ClassVar[str] = ""
    """Marker in a record's text at the place of an item."""

    resize = ""
    """How images are resized; `tiles`: they are cut into tiles (`encoders.native.vit.tiles`)."""
    rotary_positions = False
    """True if queries and keys are rotated by position."""
    deepstack: Sequence[int] = ()
    """Layers whose states the first layers of the language model get too (DeepStack)."""

    @property
    def parts(self) -> Mapping[str, Any]:
        """The encoders with layers that this one consists of, by name; of a single one, itself without a name."""
        return {"": self}

    @property
    def sizes_vary(self) -> bool:
        """True if items differ in their number of tokens."""
        return False

    @property
    def leading_tokens(self) -> int:
        """Tokens of each item in front of its patches, inside the encoder."""
        return 0

    @property
    def kept_tokens(self) -> int:
        """Tokens of each item in front of its patches, in the sequence."""
        return 0

    @property
    def largest_area(self) -> int:
        """Pixels of the largest image that layers see; 0: not known."""
        return 0

    @property
    def transform(self) -> ImageTransform:
        """How an image becomes one of `input_size`."""
        return ImageTransform()

    @property
    def is_tiled(self) -> bool:
        """True if images are cut into tiles."""
        return self.resize == "tiles"

    @abstractmethod
    def input_size(self, extent0: int, extent1: int, /, *, merge: int = 1) -> tuple[int, int]:
        """Return the size in which the encoder gets an item: (height, width) in pixels, or (samples, samples per
        second). Raises EncoderError for an extent that it cannot take."""

    @abstractmethod
    def inner_tokens(self, extent0: int, extent1: int, /, *, merge: int = 1) -> int:
        """Return the tokens of an item inside the encoder. Raises EncoderError as `input_size` does."""

    @abstractmethod
    def num_tokens(self, extent0: int, extent1: int, /, *, merge: int = 1) -> int:
        """Return the tokens of an item in the sequence. Raises EncoderError as `input_size` does."""

    @abstractmethod
    def joined(self, merge: int) -> int:
        """Return how many tokens inside the encoder make one of the sequence."""

    @abstractmethod
    def most_tokens(self, merge: int = 1) -> int:
        """Return the tokens in the sequence of the largest item."""

    @abstractmethod
    def most_inner_tokens(self, merge: int = 1) -> int:
        """Return the tokens inside the encoder of the largest item."""

    @abstractmethod
    def describe_input(self, merge: int) -> tuple[str, str, str]:
        """Return how an item is read, what the layers see of it, and its tokens in the sequence, in words."""

    @abstractmethod
    def faults(self) -> list[tuple[str, str]]:
        """Return (field, sentence) of everything that cannot be built."""

    @abstractmethod
    def joint_faults(self, merge: int) -> list[tuple[str, str]]:
        """Return (field of the module, sentence) of faults together with a projector."""

    @abstractmethod
    def num_parameters(self) -> int:
        """Return the number of parameters, biases and norms included."""

    def token_grid(self, extent0: int, extent1: int, /, *, merge: int = 1) -> tuple[int, int] | None:
        """Return (rows, columns) of the tokens in the sequence that come from an image; None where there is no grid."""
        return None

    def attention_pairs(self, extent0: int, extent1: int, /, *, merge: int = 1) -> int:
        """Return the pairs of tokens of an item that attend to each other, in a layer on average: all."""
        return self.inner_tokens(extent0, extent1, merge=merge) ** 2

    def most_features(self, merge: int = 1) -> int:
        """Return the features of the largest item in front of the projector."""
        return self.most_tokens(merge)

    def patches_of(self, tokens: float, merge: int = 1) -> float:
        """Return the patches or frames of items that take `tokens` in the sequence, all together."""
        return tokens * self.joined(merge)

    def joined_width(self, merge: int) -> int:
        """Return the width of the features that the projector reads: all that make a token, side by side."""
        return self.hidden_size * self.joined(merge)


class LayeredSpec(EncoderSpec):
    """The spec of an encoder whose layers are built here, and so can be split by tensor and pipeline parallelism."""

    if TYPE_CHECKING:
        num_layers: int
        num_attention_heads: int
        ffn_hidden_size: int
        layernorm_epsilon: float
        activation: str
        init_std: float

    normalization = "LayerNorm"
    feature_layer = -1
    """The layer whose output is read, counted from the last one; layers behind it are not built."""
    final_norm = True
    """True if a norm follows the layers."""
    key_bias = True
    layer_scale = 0.0
    """Initial factor of the learned scale behind attention and feed-forward block; 0: none."""
    full_attention: Sequence[int] | None = None
    """Layers, counted from 0, whose tokens attend to the whole item, where others attend inside windows; None: all."""

    @property
    def built_layers(self) -> int:
        """Number of layers up to the one that is read."""
        return self.num_layers + 1 + self.feature_layer

    @property
    @abstractmethod
    def token_unit_fields(self) -> tuple[str, ...]:
        """Fields of the module that `token_unit` follows from."""

    @abstractmethod
    def token_unit(self, merge: int = 1) -> int:
        """Return a divisor of the number of tokens that any item has inside the encoder."""

    @abstractmethod
    def embedding_products(self) -> dict[str, int]:
        """Return the parameters in front of the layers: multiplications with each for one token inside."""

    def layer_faults(self) -> list[tuple[str, str]]:
        """Return (field, sentence) of everything that is wrong with the sizes of the layers."""
        faults = [
            (name, f"must be at least 1, is {getattr(self, name)}")
            for name in ("hidden_size", "num_layers", "num_attention_heads", "ffn_hidden_size")
            if getattr(self, name) < 1
        ]
        heads, layers = self.num_attention_heads, self.num_layers
        if not faults and self.hidden_size % heads:
            text = f"{heads} does not divide hidden_size {self.hidden_size}: change one of them"
            faults.append(("num_attention_heads", text))
        if self.normalization not in ("LayerNorm", "RMSNorm"):
            faults.append(("normalization", f"must be LayerNorm or RMSNorm, is {self.normalization!r}"))
        choices = (*ACTIVATIONS, GATED)
        if self.activation not in choices:
            faults.append(("activation", f"must be one of {', '.join(choices)}, is {self.activation!r}"))
        if layers >= 1 and not -layers <= self.feature_layer <= -1:
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
    """Tokens that a medium takes in the language model's sequence. Raises EncoderError as `EncoderSpec.input_size`."""
    tokens = encoder.num_tokens(*extent, merge=projector.merge)
    return projector.latents or tokens


def most_tokens(encoder: EncoderSpec, projector: Merging) -> int:
    """Tokens that the largest medium takes in the language model's sequence."""
    return projector.latents or encoder.most_tokens(projector.merge)


def token_grid(encoder: EncoderSpec, projector: Merging, *extent: int) -> tuple[int, int] | None:
    """(rows, columns) of the tokens that an image takes in the sequence, row by row; None where they form no grid, as
    those of a clip, latents of a resampler, or those behind a class token. A spec without `token_grid` has none."""
    grid = None if projector.latents else encoder.token_grid(*extent, merge=projector.merge)
    return grid if grid and grid[0] * grid[1] == num_tokens(encoder, projector, *extent) else None


def joint_faults(encoder: EncoderSpec, projector: Merging) -> list[tuple[str, str]]:
    """(field of the module, sentence) of faults of an encoder and a projector together."""
    found, tiled = encoder.joint_faults(projector.merge), encoder.is_tiled
    if tiled and projector.latents:
        text = f"is {projector.latents}, and with encoder.resize tiles an image has lines of features: set it to 0"
        found.append(("projector.resampler.latents", text))
    if tiled != projector.newline:
        text = f"encoder.resize {encoder.resize or 'of another kind'} "
        text += "has rows behind lines: set it to true" if tiled else "has no lines in the sequence: set it to false"
        found.append(("projector.newline", f"is {str(projector.newline).lower()}, and {text}"))
    return found
