"""Sizes of an encoder of `transformers` alone, such as SigLIP, DINOv3 or Wav2Vec2, from its directory."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from encoders.errors import EncoderError
from encoders.key_rules import MOST_LAYERS, MOST_PIXELS, key
from encoders.transformers_media.spec import AudioItems, ImageItems, ProcessorSpec

if TYPE_CHECKING:
    from encoders.transformers_media.tensors import Tensors
    from encoders.transformers_media.tower_reader import TowerReader


@dataclass
class AutoTowerSpec(ProcessorSpec):
    """Base of the specs of images and audio."""

    layers: int = key(0, at_least=0, at_most=MOST_LAYERS)
    """Number of layers, for estimates; 0: unknown."""
    hidden_state: int | None = key(None, at_least=-MOST_LAYERS, at_most=MOST_LAYERS)
    """Index of the `hidden_states` that are the features. Not set: `last_hidden_state`."""

    builder: ClassVar[str] = "encoders.transformers_media.tower:TowerEncoder"

    @property
    def dropped_tokens(self) -> int:
        """Tokens at the front of the model's output that are no features."""
        return 0

    def tensors(self) -> "Tensors":
        """Return the shapes and names of the weights. Raise EncoderError if transformers cannot build the model."""
        from encoders.transformers_media.tower_reader import tensors_of_tower

        return tensors_of_tower(self.path)

    def processor(self) -> "TowerReader":
        """Return the reader of items. Raise EncoderError if the directory has none."""
        from encoders.transformers_media.tower_reader import reader_of

        return reader_of(self.path, self.kind, self.hidden_state, getattr(self, "image_size", 0), self.dropped_tokens)

    @property
    def sizes_vary(self) -> bool:
        return not self.processor().has_one_size

    def activations(self) -> int:
        """Return roughly how many numbers the backward pass of the largest item keeps: in each layer and for each token
        inputs and outputs of norms, the attention's, and two of a feed-forward block of four times the width."""
        return self.layers * self.most_inner_tokens() * 17 * self.hidden_size

    def attention_width(self) -> int:
        return self.layers * self.hidden_size

    def rate(self) -> float:
        return self.processor().dropout

    def faults(self) -> list[tuple[str, str]]:
        if faults := super().faults():
            return faults
        layers = self.layers
        if self.hidden_state is not None and layers and not -layers - 1 <= self.hidden_state <= layers:
            text = f"{layers} layers have states {-layers - 1} to {layers}, not {self.hidden_state}"
            return [("hidden_state", text)]
        try:
            width = self.processor().width
        except EncoderError as error:
            return [("path", str(error))]
        if width != self.hidden_size:
            return [("hidden_state", f"has width {width}, the last layer {self.hidden_size}. Choose another")]
        return []


@dataclass
class TowerImages(ImageItems, AutoTowerSpec):
    """An image encoder of `transformers` as it is, such as SigLIP, DINOv3, ViT or ConvNeXT."""

    name: str = "tower_images"
    family: str = "tower_images"
    image_size: int = key(0, at_least=0, at_most=MOST_PIXELS)
    """Side in pixels of the square that images are resized to; 0: as the image processor does."""
    prefix_tokens: int = key(-1, at_least=-1, at_most=2**16)
    """Tokens before the patches (class token, registers); -1: unknown."""
    keep_prefix: bool = False
    """Keep the tokens before the patches as features. Needs `projector.merge` 1."""

    @property
    def dropped_tokens(self) -> int:
        return 0 if self.keep_prefix else max(self.prefix_tokens, 0)

    def token_grid(self, height: int, width: int, /, *, merge: int = 1) -> tuple[int, int] | None:
        grid = self.processor().grid(height, width)
        return (grid[0] // merge, grid[1] // merge) if grid else None

    def num_tokens(self, height: int, width: int, /, *, merge: int = 1) -> int:
        return self.output_tokens(height, width) // merge**2

    def joined(self, merge: int) -> int:
        return merge**2

    def most_tokens(self, merge: int = 1) -> int:
        return self.most_inner_tokens() // merge**2

    def most_inner_tokens(self, merge: int = 1) -> int:
        return max(self.output_tokens(*size) for size in self.processor().sizes)

    def describe_input(self, merge: int) -> tuple[str, str, str]:
        most = "up to " if self.sizes_vary else ""
        return "by its image processor", f"{most}{self.most_inner_tokens()}", f"{most}{self.most_tokens(merge)}"

    def faults(self) -> list[tuple[str, str]]:
        faults = super().faults()
        if not faults and self.prefix_tokens < 0:
            text = "is unknown. Set it to the number of tokens before the patches, or 0"
            faults.append(("prefix_tokens", text))
        return faults

    def joint_faults(self, merge: int) -> list[tuple[str, str]]:
        if merge == 1:
            return []
        grids = [self.processor().grid(*size) for size in self.processor().sizes]
        if self.keep_prefix or None in grids:
            return [("projector.merge", f"is {merge}, but the features form no grid. Set it to 1")]
        odd = next((grid for grid in grids if grid and (grid[0] % merge or grid[1] % merge)), None)
        if odd or self.sizes_vary:
            text = f"the grid of features, {odd[0]} x {odd[1]}" if odd else "every size of images"
            return [("projector.merge", f"{merge} does not divide {text}. Set it to 1, or set encoder.image_size")]
        return []


@dataclass
class TowerAudio(AudioItems, AutoTowerSpec):
    """An audio encoder of `transformers` as it is, such as Whisper's, Wav2Vec2, HuBERT or WavLM."""

    name: str = "tower_audio"
    family: str = "tower_audio"

    def num_tokens(self, samples: int, rate: int, /, *, merge: int = 1) -> int:
        """Return the tokens in the sequence; the last one is filled up with zeros."""
        return -(-self.output_tokens(samples, rate) // merge)

    def joined(self, merge: int) -> int:
        return merge

    def most_tokens(self, merge: int = 1) -> int:
        return -(-self.most_inner_tokens() // merge)

    def most_inner_tokens(self, merge: int = 1) -> int:
        return self.output_tokens(int(self.max_seconds * 1000), 1000)

    def joint_faults(self, merge: int) -> list[tuple[str, str]]:
        return []
