"""The interface of the specs of all encoder families, and the arithmetic of layers. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "relu", "silu")
"""Activation functions of encoders and projectors. `gelu_tanh` is the approximation by tanh."""

GATED = "swiglu"
"""The activation of layers of encoders whose feed-forward block is gated (Shazeer 2020, arXiv 2002.05202)."""


@dataclass(frozen=True)
class PictureTransform:
    """How a picture becomes one of `EncoderSpec.input_size`."""

    interpolation: str = "bicubic"
    """`bicubic` or `bilinear`, both with antialiasing."""
    shortest_edge: int = 0
    """Pixels that the shorter side gets before the middle is cut out; 0: nothing is cut, both sides are resized to what
    they become."""
    tile: int = 0
    """Side in pixels of the tiles that it is cut into; 0: it is not."""
    background: tuple[int, int, int] = (0, 0, 0)
    """Of a square around a picture that is not cut where others are: red, green, blue."""
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


class Joining(Protocol):
    """What the width of joined features follows from; every encoder's spec has it."""

    hidden_size: int

    def joined(self, merge: int) -> int:
        """See `EncoderSpec.joined`."""


class EncoderSpec(Protocol):
    """The interface of every family's spec. `extent0` and `extent1` are read from the header of a medium: height and
    width in pixels, or samples and samples per second. Everything is a pure function of the spec, so that data
    (placeholders), `mimo-train check` and the pipeline (message shapes) agree without the model."""

    name: str
    family: str
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    ffn_hidden_size: int
    normalization: str
    layernorm_epsilon: float
    activation: str
    dropout: float
    init_std: float

    @property
    def kind(self) -> str:
        """Kind of media this encoder reads: image or audio."""

    @property
    def medium(self) -> str:
        """What one of them is called."""

    @property
    def placeholder(self) -> str:
        """Marker in a record's text at the place of a medium."""

    @property
    def sizes_vary(self) -> bool:
        """Whether media differ in their number of tokens."""

    @property
    def token_unit_fields(self) -> tuple[str, ...]:
        """Fields of the module that `token_unit` follows from."""

    def input_size(self, extent0: int, extent1: int, /, *, merge: int = 1) -> tuple[int, int]:
        """Size in which the encoder gets a medium: (height, width) in pixels, or (samples, samples per second). Raises
        EncoderError for an extent that it cannot take."""

    def inner_tokens(self, extent0: int, extent1: int, /, *, merge: int = 1) -> int:
        """Tokens that a medium takes inside the encoder. Raises EncoderError as `input_size` does."""

    def num_tokens(self, extent0: int, extent1: int, /, *, merge: int = 1) -> int:
        """Tokens that a medium takes in the sequence. Raises EncoderError as `input_size` does."""

    def joined(self, merge: int) -> int:
        """How many tokens inside the encoder make one of the sequence."""

    def most_tokens(self, merge: int = 1) -> int:
        """Tokens in the sequence of the largest medium."""

    def most_inner_tokens(self, merge: int = 1) -> int:
        """Tokens inside the encoder of the largest medium."""

    def token_unit(self, merge: int = 1) -> int:
        """What divides the number of tokens that any medium has inside the encoder."""

    def embedding_products(self) -> dict[str, int]:
        """Parameters in front of the layers: multiplications with each for one token inside the encoder."""

    def describe_input(self, merge: int) -> tuple[str, str, str]:
        """How a medium is read, what the layers see of it, and its tokens in the sequence, in words."""

    def faults(self) -> list[tuple[str, str]]:
        """(field, sentence) of everything that cannot be built."""

    def joint_faults(self, merge: int) -> list[tuple[str, str]]:
        """(field of the module, sentence) of faults together with a projector."""

    def num_parameters(self) -> int:
        """Number of trainable parameters, biases and norms included."""


def encoders_in(encoder: Any) -> Mapping[str, Any]:
    """The encoders with layers of their own that an encoder consists of, by their names in it; of one, itself without a
    name."""
    return getattr(encoder, "parts", None) or {"": encoder}


def built_layers(spec: EncoderSpec) -> int:
    """Layers that are there: those up to the one that is read. A spec without `feature_layer` reads the last."""
    return spec.num_layers + 1 + getattr(spec, "feature_layer", -1)


def has_final_norm(spec: EncoderSpec) -> bool:
    """Whether a norm follows the layers. A spec without `final_norm` has one."""
    return getattr(spec, "final_norm", True)


def layer_options(spec: EncoderSpec) -> dict[str, Any]:
    """What the layers of an encoder have that not every spec names: `layer_scale` (initial factor of a learned scale
    behind attention and feed-forward block; 0: none) and `full_attention` (numbers from 0 of the layers whose tokens
    see the whole medium, where others see their window; None: all)."""
    return {name: getattr(spec, name, default) for name, default in (("layer_scale", 0.0), ("full_attention", None))}


def layer_faults(spec: EncoderSpec) -> list[tuple[str, str]]:
    """(field, sentence) of everything that is wrong with the sizes of an encoder's layers."""
    found = [
        (name, f"must be at least 1, is {getattr(spec, name)}")
        for name in ("hidden_size", "num_layers", "num_attention_heads", "ffn_hidden_size")
        if getattr(spec, name) < 1
    ]
    if not found and spec.hidden_size % spec.num_attention_heads:
        found.append(
            (
                "num_attention_heads",
                f"{spec.num_attention_heads} does not divide hidden_size {spec.hidden_size}: change one of them",
            )
        )
    if spec.normalization not in ("LayerNorm", "RMSNorm"):
        found.append(("normalization", f"must be LayerNorm or RMSNorm, is {spec.normalization!r}"))
    choices = (*ACTIVATIONS, GATED)
    if spec.activation not in choices:
        found.append(("activation", f"must be one of {', '.join(choices)}, is {spec.activation!r}"))
    layer = getattr(spec, "feature_layer", -1)
    if spec.num_layers >= 1 and not -spec.num_layers <= layer <= -1:
        found.append(
            ("feature_layer", f"must be from -{spec.num_layers} (of num_layers {spec.num_layers}) to -1, is {layer}")
        )
    return found


def layer_parameters(spec: EncoderSpec) -> tuple[int, int]:
    """Trainable parameters of one layer, biases and norms included, and of one norm."""
    hidden = spec.hidden_size
    norm = hidden * (2 if spec.normalization == "LayerNorm" else 1)
    scale = 2 * hidden if layer_options(spec)["layer_scale"] else 0
    return split_parameters(spec) + 2 * hidden + 2 * norm + scale, norm


def split_parameters(spec: EncoderSpec) -> int:
    """Parameters of one layer that tensor parallelism divides: matrices, and biases of what is cut by its outputs."""
    hidden, ffn = spec.hidden_size, spec.ffn_hidden_size
    up = 2 * ffn if spec.activation == GATED else ffn
    return 4 * hidden * hidden + 3 * hidden + hidden * up + up + ffn * hidden


def num_tokens(encoder: EncoderSpec, projector: Merging, *extent: int) -> int:
    """Tokens that a medium takes in the language model's sequence. Raises EncoderError as `EncoderSpec.input_size`."""
    tokens = encoder.num_tokens(*extent, merge=projector.merge)
    return projector.latents or tokens


def most_tokens(encoder: EncoderSpec, projector: Merging) -> int:
    """Tokens that the largest medium takes in the language model's sequence."""
    return projector.latents or encoder.most_tokens(projector.merge)


def token_grid(encoder: EncoderSpec, projector: Merging, *extent: int) -> tuple[int, int] | None:
    """(rows, columns) of the tokens that a picture takes in the sequence, row by row; None where they form no grid, as
    those of a clip, latents of a resampler, or those behind a class token. A spec without `token_grid` has none."""
    if projector.latents or not hasattr(encoder, "token_grid"):
        return None
    rows, columns = encoder.token_grid(*extent, merge=projector.merge)
    return (rows, columns) if rows * columns == num_tokens(encoder, projector, *extent) else None


def deepstack_layers(encoder: EncoderSpec) -> int:
    """Layers of the language model, the first ones, that get features of their own of this encoder. A spec without
    `deepstack` gives features to its input alone."""
    return len(getattr(encoder, "deepstack", ()))


def inner_tokens(encoder: EncoderSpec, projector: Merging, *extent: int) -> int:
    """Tokens that a medium takes inside the encoder. Raises EncoderError as `EncoderSpec.input_size`."""
    return encoder.inner_tokens(*extent, merge=projector.merge)


def attention_pairs(encoder: EncoderSpec, projector: Merging, *extent: int) -> int:
    """Pairs of tokens of a medium that attend to each other inside the encoder, in a layer on average: all, where no
    layer has windows. Raises EncoderError as `EncoderSpec.input_size`."""
    if hasattr(encoder, "attention_pairs"):
        return encoder.attention_pairs(*extent, merge=projector.merge)
    return inner_tokens(encoder, projector, *extent) ** 2


def picture_transform(encoder: EncoderSpec) -> PictureTransform:
    """How a picture becomes one of `input_size`. A spec without `transform` stretches it."""
    return getattr(encoder, "transform", PictureTransform())


def is_tiled(encoder: EncoderSpec) -> bool:
    """Whether pictures are cut into tiles (`encoders.vit.tiles`)."""
    return getattr(encoder, "resize", "") == "tiles"


def most_features(encoder: EncoderSpec, projector: Merging) -> int:
    """Features of the largest medium in front of the projector. A spec without `most_features` has as many as
    tokens."""
    if hasattr(encoder, "most_features"):
        return encoder.most_features(projector.merge)
    return encoder.most_tokens(projector.merge)


def patches_of(encoder: EncoderSpec, projector: Merging, tokens: float) -> float:
    """Patches or frames of media that take `tokens` in the sequence, all together. A spec without `patches_of` keeps
    nothing but these."""
    if hasattr(encoder, "patches_of"):
        return encoder.patches_of(tokens, merge=projector.merge)
    return tokens * encoder.joined(projector.merge)


def input_size(encoder: EncoderSpec, projector: Merging, *extent: int) -> tuple[int, int]:
    """Size in which the encoder gets a medium. Raises EncoderError as `EncoderSpec.input_size`."""
    return encoder.input_size(*extent, merge=projector.merge)


def joint_faults(encoder: EncoderSpec, projector: Merging) -> list[tuple[str, str]]:
    """(field of the module, sentence) of faults of an encoder and a projector together."""
    found, tiled = encoder.joint_faults(projector.merge), is_tiled(encoder)
    if tiled and projector.latents:
        text = f"is {projector.latents}, and with encoder.resize tiles a picture has lines of features: set it to 0"
        found.append(("projector.resampler.latents", text))
    if tiled != projector.newline:
        text = f"encoder.resize {getattr(encoder, 'resize', 'of another kind')} "
        text += "has rows behind lines: set it to true" if tiled else "has no lines in the sequence: set it to false"
        found.append(("projector.newline", f"is {str(projector.newline).lower()}, and {text}"))
    return found


def joined_width(encoder: Joining, projector: Merging) -> int:
    """Width of the features that the projector reads. A spec without `joined_width` puts all that makes a token side by
    side."""
    if hasattr(encoder, "joined_width"):
        return encoder.joined_width(projector.merge)
    return encoder.hidden_size * encoder.joined(projector.merge)


def number_faults(spec: Any) -> list[tuple[str, str]]:
    """(field, sentence) of numbers outside of their range, of fields that most families have. Looks at the fields that
    are there, so that it holds for any family."""
    found = []
    for name, fits, allowed in _RANGES:
        value = getattr(spec, name, None)
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(number, (int, float)) and not fits(number) for number in numbers):
            found.append((name, f"must be {allowed}, is {value}"))
    return found


_RANGES = (
    ("dropout", lambda value: 0 <= value < 1, "at least 0 and below 1"),
    ("init_std", lambda value: value >= 0, "at least 0"),
    ("layernorm_epsilon", lambda value: value > 0, "above 0"),
    ("pixel_std", lambda value: value > 0, "above 0 for each channel"),
)
