"""Sizes of the vision transformer of Qwen3-VL, and the arithmetic derived from them."""

from dataclasses import dataclass

from encoders.key_rules import MOST_LAYERS, MOST_PIXELS, MOST_WIDTH, key
from encoders.native.qwen_vit.spec import nearest_size
from encoders.native.vit.patch_spec import PatchSpec


@dataclass
class Qwen3VitSpec(PatchSpec):
    """The vision transformer of Qwen3-VL (2025, arXiv 2511.21631): learned and rotary positions, and DeepStack (arXiv
    2406.04334): the first layers of the language model get the states of some encoder layers. Its patch merger is the
    final norm and a projector `{kind: mlp, merge: 2, activation: gelu}` of the merged width."""

    name: str = "qwen3_vit"
    family: str = "qwen3_vit"
    resize: str = "native"
    """`native` only."""
    image_size: int = key(768, at_least=1, at_most=MOST_PIXELS)
    """Side in pixels of the grid of learned positions. Its square is the largest area if `max_pixels` is 0."""
    min_pixels: int = key(65536, at_least=0)
    max_pixels: int = key(16777216, at_least=0)
    hidden_size: int = key(1152, at_least=1, at_most=MOST_WIDTH)
    num_layers: int = key(27, at_least=1, at_most=MOST_LAYERS)
    num_attention_heads: int = key(16, at_least=1, at_most=MOST_WIDTH)
    """Attention heads."""
    ffn_hidden_size: int = key(4304, at_least=1, at_most=MOST_WIDTH)
    activation: str = "gelu_tanh"
    rotary_base: float = key(10000.0, above=0)
    """Base of the rotary frequencies."""
    deepstack: list[int] = key(factory=lambda: [8, 16, 24], at_least=0)
    """Layers, counted from 0, whose states go to the first layers of the language model."""
    deepstack_width: int = key(4096, at_least=1, at_most=MOST_WIDTH)
    """Their width: the language model's `hidden_size`."""
    merge_size: int = key(2, at_least=1, at_most=64)
    """Side of the squares of patches that they join, as `projector.merge`."""

    patch_frames = 2
    position_resize = "bilinear"
    position_corners = True
    rotary_positions = True

    def input_size(self, height: int, width: int, merge: int = 1) -> tuple[int, int]:
        """Return the size of `nearest_size`."""
        return nearest_size(height, width, self.patch_size * merge, self.min_pixels, self.largest_area)

    @property
    def merged_width(self) -> int:
        """Width of a token's patches, side by side."""
        return self.hidden_size * self.merge_size**2

    def num_parameters(self) -> int:
        width, out = self.merged_width, self.deepstack_width
        return super().num_parameters() + len(self.deepstack) * (2 * width + width * (width + 1) + out * (width + 1))

    def embedding_products(self) -> dict[str, int]:
        """Return {weight outside of the layers: its multiplications for one patch}."""
        width, squares = self.merged_width, self.merge_size**2
        products = super().embedding_products()
        for number in range(len(self.deepstack)):
            products[f"deepstack.{number}.linear_fc1.weight"] = width * width // squares
            products[f"deepstack.{number}.linear_fc2.weight"] = width * self.deepstack_width // squares
        return products

    def joint_faults(self, merge: int) -> list[tuple[str, str]]:
        faults = super().joint_faults(merge)
        if merge != self.merge_size:
            text = f"{merge} is not encoder.merge_size {self.merge_size}: the projector and the mergers of deepstack "
            faults.append(("projector.merge", f"{text}join the same squares"))
        return faults

    def faults(self) -> list[tuple[str, str]]:
        faults = super().faults()
        if self.resize != "native":
            faults.append(("resize", f"must be native, is {self.resize!r}"))
        if set(self.deepstack) - set(range(self.num_layers)) or sorted(set(self.deepstack)) != self.deepstack:
            text = f"must name layers from 0 to {self.num_layers - 1} in order, each once, is {self.deepstack}"
            faults.append(("deepstack", text))
        return faults + self.rotary_faults()
