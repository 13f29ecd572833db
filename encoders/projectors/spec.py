"""Sizes of a projector, and the arithmetic derived from them."""

import dataclasses
from dataclasses import dataclass, field

from encoders.base import ACTIVATIONS, GATED
from encoders.key_rules import MOST_LAYERS, MOST_WIDTH, FixedKeys, key

NORMS = ("LayerNorm", "RMSNorm")


@dataclass
class ResamplerSpec(FixedKeys):
    """A perceiver resampler behind the projection (Jaegle et al. 2021, arXiv 2103.03206; as Idefics2 has it, Laurençon
    et al. 2024, arXiv 2405.02246): learned latents attend to all features of an image or clip and to each other, layer
    by layer. Its linear layers have no bias; it is as wide as the language model."""

    latents: int = key(0, at_least=0, at_most=2**20)
    """Rows of every item in the sequence; 0: no resampler."""
    num_layers: int = key(3, at_least=1, at_most=MOST_LAYERS)
    """Layers, each an attention and a feed-forward block."""
    num_attention_heads: int = key(16, at_least=1, at_most=MOST_WIDTH)
    """Query heads."""
    num_query_groups: int = key(0, at_least=0, at_most=MOST_WIDTH)
    """Key heads; 0: as many as query heads."""
    head_size: int = key(0, at_least=0, at_most=MOST_WIDTH)
    """Width of a head; 0: the language model's hidden size / `num_attention_heads`."""
    ffn_hidden_size: int = key(0, at_least=0, at_most=MOST_WIDTH)
    """Width of the feed-forward block; 0: four times the language model's hidden size."""
    activation: str = "swiglu"
    """`gelu`, `gelu_tanh`, `quick_gelu`, `relu`, `silu`, or `swiglu` (gated)."""
    normalization: str = "RMSNorm"
    """`RMSNorm` or `LayerNorm`."""
    layernorm_epsilon: float = key(1e-6, above=0, below=1)
    """Epsilon of every norm."""

    @property
    def key_heads(self) -> int:
        """Number of key heads."""
        return self.num_query_groups or self.num_attention_heads

    def head_width(self, width: int) -> int:
        """Return the width of a head in a language model of `width`."""
        return self.head_size or width // self.num_attention_heads

    def ffn_width(self, width: int) -> int:
        """Return the width of the feed-forward block in a language model of `width`."""
        return self.ffn_hidden_size or 4 * width

    def matrices(self, width: int) -> dict[str, int]:
        """Return {linear layer: its weights} of one layer in a language model of `width`."""
        query, key = (heads * self.head_width(width) for heads in (self.num_attention_heads, self.key_heads))
        up = (2 if self.activation == GATED else 1) * self.ffn_width(width)
        products = {"linear_q": width * query, "linear_k": width * key, "linear_v": width * key}
        products |= {"linear_proj": query * width, "mlp.linear_fc1": width * up}
        return products | {"mlp.linear_fc2": self.ffn_width(width) * width}

    def split_parameters(self, width: int) -> int:
        """Return the parameters that tensor parallelism divides."""
        return self.num_layers * sum(self.matrices(width).values()) if self.latents else 0

    def num_parameters(self, width: int) -> int:
        """Return the number of trainable parameters in a language model of `width`."""
        norm = width * (2 if self.normalization == "LayerNorm" else 1)
        replicated = self.latents * width + (3 * self.num_layers + 1) * norm
        return self.split_parameters(width) + replicated if self.latents else 0

    def faults(self) -> list[tuple[str, str]]:
        """Return (field, message) of every config error."""
        if self.latents == 0:
            # Other keys are unused, so none may be set.
            return [
                (
                    field.name,
                    f"is {getattr(self, field.name)!r}, and latents 0 makes no resampler: remove it, or set latents",
                )
                for field in dataclasses.fields(self)
                if getattr(self, field.name) != field.default
            ]
        faults = []
        if self.num_attention_heads % self.key_heads:
            text = f"{self.key_heads} does not divide num_attention_heads {self.num_attention_heads}: change one"
            faults.append(("num_query_groups", text))
        if self.activation not in (*ACTIVATIONS, GATED):
            text = f"must be one of {', '.join((*ACTIVATIONS, GATED))}, is {self.activation!r}"
            faults.append(("activation", text))
        if self.normalization not in NORMS:
            faults.append(("normalization", f"must be {' or '.join(NORMS)}, is {self.normalization!r}"))
        return faults


@dataclass
class ProjectorSpec(FixedKeys):
    """Maps encoder features into the language model's embedding space."""

    name: str = ""
    """Free name, shown in tables before `kind`."""
    kind: str = "mlp"
    """`mlp` (two linear layers with an activation between them), `linear` (one layer), or `none`: features are as wide
    as the language model already."""
    ffn_hidden_size: int = key(0, at_least=0, at_most=MOST_WIDTH)
    """Hidden width of the mlp; 0: the language model's hidden size."""
    activation: str = "gelu"
    """Activation of the mlp: `gelu`, `gelu_tanh`, `quick_gelu`, `relu`, `silu`, or `swiglu` (gated)."""
    merge: int = key(1, at_least=1, at_most=1024)
    """Features joined into one token: squares of patches with this side (pixel shuffle), or this many neighbouring
    audio frames."""
    norm: str = ""
    """Norm of the joined features before the projection, `LayerNorm` or `RMSNorm`, as in InternVL; empty: none."""
    norm_epsilon: float = key(1e-5, above=0, below=1)
    """Epsilon of that norm."""
    bias: bool = True
    """Linear layers have biases. Idefics3 and SmolVLM have none."""
    newline: bool = False
    """Add a learned row after every line of features, as in LLaVA-NeXT; with `encoder.resize: tiles`."""
    resampler: ResamplerSpec = field(default_factory=ResamplerSpec)
    """Latents that attend to what is projected."""

    @property
    def gated(self) -> bool:
        """True if the mlp is gated."""
        return self.activation == GATED

    @property
    def latents(self) -> int:
        """Rows of every image or audio item in the sequence; 0: as many as it has joined features."""
        return self.resampler.latents

    def faults(self) -> list[tuple[str, str]]:
        """Return (field, message) of every config error."""
        faults = []
        choices = (*ACTIVATIONS, GATED)
        if self.kind not in ("mlp", "linear", "none"):
            faults.append(("kind", f"must be mlp, linear or none, is {self.kind!r}"))
        if self.activation not in choices:
            faults.append(("activation", f"must be one of {', '.join(choices)}, is {self.activation!r}"))
        if self.norm not in ("", *NORMS):
            faults.append(("norm", f"must be {' or '.join(NORMS)} or empty, is {self.norm!r}"))
        default = ProjectorSpec()
        unread = {"linear": ["ffn_hidden_size", "activation"]}.get(self.kind, [])
        if self.kind == "none":
            unread = ["ffn_hidden_size", "activation", "merge", "norm", "bias", "newline", "resampler"]
        for name in [*unread, *([] if self.norm else ["norm_epsilon"])]:
            value = getattr(self, name)
            if value != getattr(default, name):
                reason = f"kind {self.kind} does not use it" if name in unread else "there is no norm"
                faults.append((name, f"is {value!r}, and {reason}: remove it"))
        return faults + [(f"resampler.{name}", text) for name, text in self.resampler.faults()]

    def matrices(self, width: int, language_width: int) -> dict[str, int]:
        """Return {linear layer: its weights} of the projection from joined features of `width` to `language_width`."""
        if self.kind == "none":
            return {}
        if self.kind == "linear":
            return {"encoder": width * language_width}
        hidden = self.ffn_hidden_size or language_width
        up = 2 * hidden if self.gated else hidden
        return {"encoder.linear_fc1": width * up, "encoder.linear_fc2": hidden * language_width}

    def num_parameters(self, width: int, language_width: int) -> int:
        """Return the number of trainable parameters between joined features of `width` and `language_width`
        embeddings."""
        return sum(self.parameters(width, language_width))

    def parameters(self, width: int, language_width: int) -> tuple[int, int]:
        """Return the trainable parameters that tensor parallelism divides, and those whole on every rank: the last bias
        of an mlp, norms, latents."""
        if self.kind == "none":
            return 0, 0
        split, replicated = sum(self.matrices(width, language_width).values()), 0
        if self.norm:
            replicated += width * (2 if self.norm == "LayerNorm" else 1)
        if self.bias and self.kind == "linear":
            split += language_width
        elif self.bias:
            split += (2 if self.gated else 1) * (self.ffn_hidden_size or language_width)
            replicated += language_width
        replicated += language_width if self.newline else 0
        resampled = self.resampler.split_parameters(language_width)
        return split + resampled, replicated + self.resampler.num_parameters(language_width) - resampled
