"""The interface of the specs of all encoder families, and the arithmetic of layers. Imports no torch."""

from typing import Any, Protocol

ACTIVATIONS = ("gelu", "quick_gelu", "relu", "silu")
"""Activation functions of encoders and projectors."""


class Merging(Protocol):
    """What the arithmetic of an encoder needs of the projector behind it."""

    merge: int
    """See `encoders.projectors.spec.ProjectorSpec`."""


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
    if spec.activation not in ACTIVATIONS:
        found.append(("activation", f"must be one of {', '.join(ACTIVATIONS)}, is {spec.activation!r}"))
    return found


def layer_parameters(spec: EncoderSpec) -> tuple[int, int]:
    """Trainable parameters of one layer, biases and norms included, and of one norm."""
    hidden, ffn = spec.hidden_size, spec.ffn_hidden_size
    norm = hidden * (2 if spec.normalization == "LayerNorm" else 1)
    attention = (hidden * 3 * hidden + 3 * hidden) + (hidden * hidden + hidden)
    return attention + (hidden * ffn + ffn) + (ffn * hidden + hidden) + 2 * norm, norm


def num_tokens(encoder: EncoderSpec, projector: Merging, *extent: int) -> int:
    """Tokens that a medium takes in the language model's sequence. Raises EncoderError as `EncoderSpec.input_size`."""
    return encoder.num_tokens(*extent, merge=projector.merge)


def inner_tokens(encoder: EncoderSpec, projector: Merging, *extent: int) -> int:
    """Tokens that a medium takes inside the encoder. Raises EncoderError as `EncoderSpec.input_size`."""
    return encoder.inner_tokens(*extent, merge=projector.merge)


def input_size(encoder: EncoderSpec, projector: Merging, *extent: int) -> tuple[int, int]:
    """Size in which the encoder gets a medium. Raises EncoderError as `EncoderSpec.input_size`."""
    return encoder.input_size(*extent, merge=projector.merge)


def joint_faults(encoder: EncoderSpec, projector: Merging) -> list[tuple[str, str]]:
    """(field of the module, sentence) of faults of an encoder and a projector together."""
    return encoder.joint_faults(projector.merge)


def joined_width(encoder: EncoderSpec, projector: Merging) -> int:
    """Width of the features that the projector reads."""
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
