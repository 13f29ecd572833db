"""Base classes for the specs of a user's own encoders, which are plain torch modules."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from encoders.base import EncoderSpec
from encoders.errors import EncoderError
from encoders.key_rules import MOST_PIXELS, MOST_WIDTH, key


@dataclass
class PlainSpec(EncoderSpec):
    """Base of the specs of all plain encoders: derive from `ImageSpec` or `AudioSpec`."""

    name: str = "own"
    """Free name, shown in tables."""
    family: str = ""
    """The code of the encoder: a family, `package.module:Spec` or an entry point. See docs/your-encoder.md."""
    hidden_size: int = key(0, at_least=0, at_most=MOST_WIDTH)
    """Width of the features."""
    dropout: float = key(0.0, at_least=0, below=1)
    """Largest probability of dropout inside the encoder; 0: none."""

    builder: ClassVar[str] = ""
    """`module:Class` of the torch module, which is made with the spec as its only argument."""

    @abstractmethod
    def output_tokens(self, extent0: int, extent1: int, /) -> int:
        """Return the features that the module gives for an item of this input size, before they are joined."""

    def activations(self) -> int:
        """Return the numbers that the backward pass of the largest item keeps. 0: unknown; `check` says so and counts
        none."""
        return 0

    def attention_width(self) -> int:
        """Return the sum over layers of the width of full self-attention, for its FLOPs; 0: none is counted."""
        return 0

    def notes(self) -> list[str]:
        """Return notes for the user; `check` prints them as warnings."""
        return []

    def faults(self) -> list[tuple[str, str]]:
        faults = []
        if self.hidden_size < 1:
            faults.append(("hidden_size", f"must be at least 1, the width of the features, is {self.hidden_size}"))
        return faults


@dataclass
class ImageSpec(PlainSpec):
    """A torch module from images to features: float [N, 3, height, width] -> [N, rows * columns, hidden_size], in row
    order. A subclass defines `grid` and `num_parameters`. The images have one size unless it also overrides
    `input_size`, `sizes_vary`, `most_tokens` and `most_inner_tokens`."""

    image_size: int = key(224, at_least=1, at_most=MOST_PIXELS)
    """Height and width in pixels that every image is resized to; its aspect ratio is not kept."""
    pixel_scale: float = key(1 / 255, above=0, at_most=1e6)
    """What pixels, 0 to 255, are multiplied with."""
    pixel_mean: list[float] = key(factory=lambda: [0.5, 0.5, 0.5], at_least=-1e6, at_most=1e6)
    """Mean per channel (red, green, blue), of scaled pixels."""
    pixel_std: list[float] = key(factory=lambda: [0.5, 0.5, 0.5], above=0, at_most=1e6)
    """Standard deviation per channel, of scaled pixels."""

    kind: ClassVar[str] = "image"
    medium: ClassVar[str] = "image"
    placeholder: ClassVar[str] = "<image>"

    @abstractmethod
    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return (rows, columns) of the features of an image of `height` x `width` input pixels. Features without an
        order in the plane are one row."""

    def input_size(self, height: int, width: int, /, *, merge: int = 1) -> tuple[int, int]:
        return self.image_size, self.image_size

    def output_tokens(self, height: int, width: int, /) -> int:
        return math.prod(self.grid(height, width))

    def inner_tokens(self, height: int, width: int, /, *, merge: int = 1) -> int:
        return self.output_tokens(*self.input_size(height, width, merge=merge))

    def num_tokens(self, height: int, width: int, /, *, merge: int = 1) -> int:
        rows, columns = self.grid(*self.input_size(height, width, merge=merge))
        return (rows // merge) * (columns // merge)

    def joined(self, merge: int) -> int:
        return merge**2

    def most_tokens(self, merge: int = 1) -> int:
        return self.num_tokens(self.image_size, self.image_size, merge=merge)

    def most_inner_tokens(self, merge: int = 1) -> int:
        return self.inner_tokens(self.image_size, self.image_size, merge=merge)

    def describe_input(self, merge: int) -> tuple[str, str, str]:
        height, width = self.input_size(self.image_size, self.image_size, merge=merge)
        rows, columns = self.grid(height, width)
        most = "up to " if self.sizes_vary else ""
        return f"{most}{height} x {width} pixels", f"{most}{rows} x {columns}", f"{most}{self.most_tokens(merge)}"

    def faults(self) -> list[tuple[str, str]]:
        faults = super().faults()
        if self.image_size < 1:
            faults.append(("image_size", f"must be at least 1, is {self.image_size}"))
        for name in ("pixel_mean", "pixel_std"):
            if len(getattr(self, name)) != 3:
                faults.append((name, f"needs 3 numbers (red, green, blue), has {len(getattr(self, name))}"))
        if 0 in self.pixel_std:
            faults.append(("pixel_std", f"pixels are divided by it, and it is {list(self.pixel_std)}: use no 0"))
        if not faults and min(grid := self.grid(*self.input_size(self.image_size, self.image_size))) < 1:
            faults.append(("image_size", f"{self.image_size} pixels give {grid[0]} x {grid[1]} features: raise it"))
        return faults

    def joint_faults(self, merge: int) -> list[tuple[str, str]]:
        rows, columns = self.grid(*self.input_size(self.image_size, self.image_size, merge=merge))
        if rows % merge or columns % merge:
            return [("projector.merge", f"{merge} does not divide the grid of features, {rows} x {columns}: change it")]
        return []


@dataclass
class AudioSpec(PlainSpec):
    """A torch module from audio to features: float [N, samples] -> [N, tokens, hidden_size]. A subclass defines
    `tokens`, `shortest` and `num_parameters`. Audio keeps its length; items of one length go together."""

    sample_rate: int = key(16000, at_least=1, at_most=2**20)
    """Samples per second that every clip is resampled to."""
    max_seconds: float = key(30.0, above=0, at_most=86400)
    """Longest audio, in seconds. A sample with a longer one is bad."""

    kind: ClassVar[str] = "audio"
    medium: ClassVar[str] = "clip"
    placeholder: ClassVar[str] = "<audio>"

    @property
    def sizes_vary(self) -> bool:
        return True

    @abstractmethod
    def tokens(self, samples: int) -> int:
        """Return the features that the module gives for audio of this many samples; never fewer for longer audio."""

    @abstractmethod
    def shortest(self, tokens: int) -> int:
        """Return the samples of the shortest audio that gives this many features."""

    def input_size(self, samples: int, rate: int, /, *, merge: int = 1) -> tuple[int, int]:
        """Return (samples, samples per second) of the encoder's input: resampled, and padded with silence to whole
        tokens. Raise EncoderError if it is longer than `max_seconds`."""
        length = -(-samples * self.sample_rate // rate)
        if length > self.max_seconds * self.sample_rate:
            raise EncoderError(
                f"its {samples / rate:.2f} seconds ({samples} samples at {rate} Hz) are more than "
                f"encoder.max_seconds {self.max_seconds:g}: cut the clip, or raise it"
            )
        features = self.tokens(length)
        padded = max(1, -(-features // merge)) * merge
        return (length if features == padded else self.shortest(padded)), self.sample_rate

    def output_tokens(self, samples: int, rate: int, /) -> int:
        return self.tokens(samples)

    def inner_tokens(self, samples: int, rate: int, /, *, merge: int = 1) -> int:
        return self.tokens(self.input_size(samples, rate, merge=merge)[0])

    def num_tokens(self, samples: int, rate: int, /, *, merge: int = 1) -> int:
        return self.inner_tokens(samples, rate, merge=merge) // merge

    def joined(self, merge: int) -> int:
        return merge

    def most_tokens(self, merge: int = 1) -> int:
        return self.most_inner_tokens(merge) // merge

    def most_inner_tokens(self, merge: int = 1) -> int:
        return self.inner_tokens(int(self.max_seconds * self.sample_rate), self.sample_rate, merge=merge)

    def describe_input(self, merge: int) -> tuple[str, str, str]:
        return (
            f"{self.sample_rate} samples a second, up to {self.max_seconds:g} s",
            f"up to {self.most_inner_tokens(merge)}",
            f"up to {self.most_tokens(merge)}",
        )

    def faults(self) -> list[tuple[str, str]]:
        faults = super().faults()
        if self.sample_rate < 1:
            faults.append(("sample_rate", f"must be at least 1, is {self.sample_rate}"))
        return faults

    def joint_faults(self, merge: int) -> list[tuple[str, str]]:
        """Return no errors: any merge is supported."""
        return []
