"""Sizes of the vision transformer of Qwen3-VL, and the arithmetic derived from them."""

from dataclasses import dataclass

from encoders.native.qwen_vit.spec import nearest_size
from encoders.native.vit.patch_spec import PatchSpec
from encoders.ranges import MOST_LAYERS, MOST_PIXELS, MOST_WIDTH, key


@dataclass
class Qwen3VitSpec(PatchSpec):
    """The vision transformer of Qwen3-VL (2025, arXiv 2511.21631): pictures keep their aspect ratio, positions are
    learned and rotary, and the states behind some layers are given to the first layers of the language model too
    (DeepStack, arXiv 2406.04334). Its patch merger is the final norm with a projector `{kind: mlp, merge: 2,
    activation: gelu}` of the merged width behind it."""

    name: str = "qwen3_vit"
    """Free name, shown in tables."""
    family: str = "qwen3_vit"
    """Which code builds the encoder: a key of `encoders.registry.FAMILIES`."""
    resize: str = "native"
    """`native`, the only one: a picture keeps its aspect ratio; sides become the nearest multiples of `patch_size *
    merge`."""
    image_size: int = key(768, at_least=1, at_most=MOST_PIXELS)
    """Height and width, in pixels, of the grid of learned positions. Its square is the largest area where `max_pixels`
    is 0."""
    min_pixels: int = key(65536, at_least=0)
    """Smaller pictures are enlarged to at least this area in pixels."""
    max_pixels: int = key(16777216, at_least=0)
    """Larger pictures are reduced to at most this area in pixels. 0: `image_size` squared."""
    hidden_size: int = key(1152, at_least=1, at_most=MOST_WIDTH)
    """Width of the residual stream."""
    num_layers: int = key(27, at_least=1, at_most=MOST_LAYERS)
    """Transformer layers."""
    num_attention_heads: int = key(16, at_least=1, at_most=MOST_WIDTH)
    """Attention heads, of a multiple of 4. Must divide `hidden_size` and be divisible by the module's `tp`."""
    ffn_hidden_size: int = key(4304, at_least=1, at_most=MOST_WIDTH)
    """Width of the feed-forward block. Must be divisible by the module's `tp`."""
    activation: str = "gelu_tanh"
    """As in family `vit`."""
    rotary_base: float = key(10000.0, above=0)
    """Base of the frequencies of positions."""
    deepstack: list[int] = key(factory=lambda: [8, 16, 24], at_least=0)
    """Layers, counted from 0, whose states the language model gets behind its first, second, ... layer, each through a
    merger of its own. The first stage of the language model must have as many layers, the encoder one stage."""
    deepstack_width: int = key(4096, at_least=1, at_most=MOST_WIDTH)
    """Width of these features: the language model's `hidden_size`."""
    merge_size: int = key(2, at_least=1, at_most=64)
    """Side of the squares of patches that these mergers join: the projector's `merge`."""

    patch_frames = 2
    position_resize = "bilinear"
    position_corners = True
    rotary_positions = True

    def input_size(self, height: int, width: int, merge: int = 1) -> tuple[int, int]:
        """See `nearest_size`."""
        return nearest_size(height, width, self.patch_size * merge, self.min_pixels, self.largest_area)

    @property
    def merged_width(self) -> int:
        """Width of the patches of a token, side by side."""
        return self.hidden_size * self.merge_size**2

    def num_parameters(self) -> int:
        """Number of trainable parameters, biases and norms included."""
        width, out = self.merged_width, self.deepstack_width
        return super().num_parameters() + len(self.deepstack) * (2 * width + width * (width + 1) + out * (width + 1))

    def embedding_products(self) -> dict[str, int]:
        """Parameters outside of the layers: multiplications with each for one patch."""
        width, squares = self.merged_width, self.merge_size**2
        products = super().embedding_products()
        for number in range(len(self.deepstack)):
            products[f"deepstack.{number}.linear_fc1.weight"] = width * width // squares
            products[f"deepstack.{number}.linear_fc2.weight"] = width * self.deepstack_width // squares
        return products

    def joint_faults(self, merge: int) -> list[tuple[str, str]]:
        """(field of the module, sentence) of faults together with a projector."""
        found = super().joint_faults(merge)
        if merge != self.merge_size:
            text = f"{merge} is not encoder.merge_size {self.merge_size}: the projector and the mergers of deepstack "
            found.append(("projector.merge", f"{text}join the same squares"))
        return found

    def faults(self) -> list[tuple[str, str]]:
        """(field, sentence) of everything that cannot be built."""
        found = super().faults()
        if self.resize != "native":
            found.append(("resize", f"must be native, is {self.resize!r}"))
        if set(self.deepstack) - set(range(self.num_layers)) or sorted(set(self.deepstack)) != self.deepstack:
            text = f"must name layers from 0 to {self.num_layers - 1} in order, each once, is {self.deepstack}"
            found.append(("deepstack", text))
        if self.deepstack_width < 1:
            found.append(("deepstack_width", f"must be at least 1, is {self.deepstack_width}"))
        return found + self.rotary_faults()
