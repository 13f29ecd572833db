"""Sizes of a projector, and the arithmetic derived from them. Imports no torch."""

from dataclasses import dataclass

from encoders.spec import ACTIVATIONS


@dataclass
class ProjectorSpec:
    """A projector of encoder features into the language model's embedding space."""

    name: str = "mlp"
    """Free name, shown in tables."""
    kind: str = "mlp"
    """`mlp` (two linear layers with an activation between them) or `linear` (one)."""
    ffn_hidden_size: int = 0
    """Hidden width of the mlp, at least 0; 0: the language model's hidden size."""
    activation: str = "gelu"
    """`gelu`, `gelu_tanh`, `quick_gelu`, `relu` or `silu`."""
    merge: int = 1
    """What is joined into one token before the projection: of a picture the square of neighbouring patches with this
    side (pixel shuffle; 2 makes a quarter of the tokens, each four times as wide), of a clip so many neighbouring
    frames. At least 1. Must divide the patch grid of `resize: fixed`."""

    def faults(self) -> list[tuple[str, str]]:
        """(field, sentence) of everything that cannot be built."""
        found = []
        if self.kind not in ("mlp", "linear"):
            found.append(("kind", f"must be mlp or linear, is {self.kind!r}"))
        if self.activation not in ACTIVATIONS:
            found.append(("activation", f"must be one of {', '.join(ACTIVATIONS)}, is {self.activation!r}"))
        if self.merge < 1:
            found.append(("merge", f"must be at least 1, is {self.merge}"))
        if self.ffn_hidden_size < 0:
            found.append(("ffn_hidden_size", f"must be at least 0, is {self.ffn_hidden_size}"))
        return found

    def num_parameters(self, width: int, language_width: int) -> int:
        """Number of trainable parameters between joined features of `width` and `language_width` embeddings."""
        if self.kind == "linear":
            return width * language_width + language_width
        hidden = self.ffn_hidden_size or language_width
        return width * hidden + hidden + hidden * language_width + language_width
