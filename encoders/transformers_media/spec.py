"""Sizes of encoders of `transformers`, from their directories: the image or audio side of a model."""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from encoders.base import Grid
from encoders.errors import EncoderError
from encoders.key_rules import MOST_WIDTH, FixedKeys, key
from encoders.plain.spec import PlainSpec
from encoders.transformers_media.video_keys import FRAMES, VideoKeys

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from encoders.transformers_media.frame_resizing import Decode
    from encoders.transformers_media.processor import MediaProcessor
    from encoders.transformers_media.sound import VideoSound
    from encoders.transformers_media.tensors import Tensors


@dataclass
class ProcessorSpec(FixedKeys, PlainSpec):
    """Base of the specs of encoders whose items their own processor reads. Sizes are read in the directory:
    `pretrained` fills them in."""

    path: str = ""
    """Directory of the model, with its processor. `pretrained` sets this and the sizes."""
    hidden_size: int = key(0, at_least=0, at_most=MOST_WIDTH)
    """Width of the features."""
    parameters: int = key(0, at_least=0, at_most=2**50)
    """Number of parameters."""

    if TYPE_CHECKING:

        def processor(self) -> Any:
            """Return the processor. Raise EncoderError if it cannot be loaded."""

        def tensors(self) -> Tensors:
            """Return the shapes and names of the weights. Raise EncoderError if transformers cannot build the model."""

        def rate(self) -> float:
            """Return the largest probability of dropout in config.json."""

    def input_size(self, *extent: int, merge: int = 1) -> tuple[int, ...]:
        return extent

    def inner_tokens(self, *extent: int, merge: int = 1) -> int:
        """Return the features: tokens inside the encoder are not known."""
        return self.output_tokens(*extent)

    def output_tokens(self, *extent: int) -> int:
        return int(self.processor().rows(*extent))

    def num_parameters(self) -> int:
        return self.parameters

    def faults(self) -> list[tuple[str, str]]:
        if not self.path:
            return [("path", "is empty: set pretrained of the module to a directory of transformers")]
        try:
            self.processor()
        except EncoderError as error:
            return [("path", str(error))]
        rate = self.rate()
        if self.dropout not in (0, rate):
            return [("dropout", f"is {self.dropout:g}: set it to {rate:g} as in config.json, or to 0 for none")]
        return super().faults()


@dataclass
class ImageItems(ProcessorSpec):
    """Base of the specs of images."""

    kind: ClassVar[str] = "image"
    medium: ClassVar[str] = "image"
    placeholder: ClassVar[str] = "<image>"


SECONDS = (30.0, 20.0, 10.0, 8.0, 5.0, 4.0, 3.0, 2.0, 1.0)
"""Lengths of audio to try, from the longest."""


@cache
def default_max_seconds(reader: Any) -> float:
    """Return the first of SECONDS that a reader of audio does not cut."""
    return next((seconds for seconds in SECONDS if not reader.cuts(seconds)), SECONDS[-1])


@dataclass
class AudioItems(ProcessorSpec):
    """Base of the specs of audio."""

    max_seconds: float = key(30.0, above=0, at_most=86400)
    """Longest audio, in seconds. A sample with a longer one is bad."""

    kind: ClassVar[str] = "audio"
    medium: ClassVar[str] = "clip"
    placeholder: ClassVar[str] = "<audio>"

    def input_size(self, *extent: int, merge: int = 1) -> tuple[int, ...]:
        """Return (samples, samples per second), resampled. Raise EncoderError if it is longer than `max_seconds`."""
        samples, rate = extent
        if samples > self.max_seconds * rate:
            raise EncoderError(
                f"it lasts {samples / rate:.2f} s, longer than encoder.max_seconds={self.max_seconds:g}. Cut it, "
                "or raise max_seconds"
            )
        processor = self.processor()
        return processor.length(samples, rate), processor.sample_rate

    def describe_input(self, merge: int) -> tuple[str, str, str]:
        most, seconds = "up to " if self.sizes_vary else "", f"up to {self.max_seconds:g} s"
        rate = f"{self.processor().sample_rate} samples a second, {seconds}"
        return rate, f"{most}{self.most_inner_tokens()}", f"{most}{self.most_tokens(merge)}"

    def faults(self) -> list[tuple[str, str]]:
        faults = super().faults()
        if not faults and self.processor().cuts(self.max_seconds):
            text = f"is {self.max_seconds:g}, but the feature extractor cuts audio of this length. "
            # The seconds that it cuts are all those above a bound.
            most = bisect(range(1, int(self.max_seconds) + 1), False, key=self.processor().cuts)
            text += f"Set it to {most}" if most else "Lower it"
            faults.append(("max_seconds", text))
        return faults


@dataclass
class MediaSpec(ProcessorSpec):
    """Base of the specs of the image or audio side of a model with a language model."""

    pad: int = key(-1, at_least=-1)
    """Id of the tokens that features replace."""
    axes: bool = False
    """The language model has positions in time, row and column."""
    class_positions: bool = False
    """Positions on several axes are those that the class of the model computes; false: those of Qwen-VL."""
    bidirectional: str = key("", choices=("", "items", "prefix"))
    """Tokens that see each other: `items` (those of one item), `prefix` (all before the first answer)."""
    adds_features: bool = False
    """Features are added to the embeddings of their tokens, instead of replacing them."""
    deepstack: list[int] = key(factory=list, at_least=0)
    """Layers of the tower whose features the first layers of the language model get."""

    builder: ClassVar[str] = "encoders.transformers_media.model:MediaEncoder"

    PROBES: ClassVar[tuple[tuple[int, int], ...]]
    """Sizes of which the largest item is taken."""

    @property
    def sizes_vary(self) -> bool:
        return True

    @property
    def deepstack_width(self) -> int:
        """Width of the features of one of the `deepstack` layers."""
        return self.hidden_size

    def processor(self) -> "MediaProcessor":
        """Return the processor. Raise EncoderError if it cannot be loaded."""
        from encoders.transformers_media.processor import processor_of

        return processor_of(self.path, self.kind, self.pad)

    def hf_config(self) -> "PretrainedConfig":
        """Return the model's config, without dropout if `dropout` is 0. Raise EncoderError if it cannot be read."""
        from encoders.transformers_media.directory import hf_config, without_dropout

        config = hf_config(self.path)
        return config if self.dropout else without_dropout(config)

    def tensors(self) -> "Tensors":
        """Return the shapes and names of the weights. Raise EncoderError if transformers cannot build the model."""
        from encoders.transformers_media.tensors import structure_of

        return structure_of(self.path).of_kind(self.kind)

    def num_tokens(self, *extent: int, merge: int = 1) -> int:
        return self.output_tokens(*extent)

    def joined(self, merge: int) -> int:
        return 1

    def most_tokens(self, merge: int = 1) -> int:
        return max(self.num_tokens(*size) for size in self.PROBES)

    def most_inner_tokens(self, merge: int = 1) -> int:
        return self.most_tokens()

    def rate(self) -> float:
        from encoders.transformers_media.directory import dropout_of, hf_config

        return dropout_of(hf_config(self.path))

    def joint_faults(self, merge: int) -> list[tuple[str, str]]:
        return (
            [("projector.merge", f"is {merge}, and the model joins features itself: set it to 1")] if merge > 1 else []
        )


@dataclass
class MediaImages(ImageItems, VideoKeys, MediaSpec):
    """The image side of a model of `transformers`."""

    name: str = "media_images"
    family: str = "media_images"

    sound: bool = False
    """Read the sound of videos too, between their frames: Qwen2.5-Omni and Qwen3-Omni. A module for audio with the same
    `pretrained` reads it. See docs/data.md#sound-of-videos."""

    PROBES: ClassVar[tuple[tuple[int, int], ...]] = ((336, 336), (1024, 1024), (512, 1024), (1024, 512))

    def output_tokens(self, *extent: int) -> int:
        return super().output_tokens(*extent) if len(extent) == 2 else self.videos().rows(*extent[:FRAMES])

    def attention_pairs(self, *extent: int, merge: int = 1) -> int:
        """Return the pairs of an image; of a video those inside of its frames, taken as equal."""
        frames = 1 if len(extent) == 2 else len(self.video_frames(*extent))
        return self.inner_tokens(*extent) ** 2 // frames

    def text(self, *extent_and_number: int) -> tuple[str, Sequence[int], str]:
        """Return the text of an image or video by its extent, followed by its number among those of the sample, from
        0: see `processor.Text`."""
        first, second, *others, number = extent_and_number
        if len(others) > FRAMES - 2:
            return self.video_sound().text(first, second, *others)
        if others:
            return self.videos().text((first, second, *others), number)
        return self.processor().text(first, second, number)

    def read_video(self, decode: "Decode", extent: Sequence[int], parts: Sequence[int]) -> list[Any]:
        """Return the inputs of a video, which is one part: see `VideoProcessor.read`."""
        return [self.videos().read(decode(self.video_frames(*extent)), extent[:FRAMES])]

    def video_sound(self) -> "VideoSound":
        """Return how the processor writes videos with sound. Raise EncoderError if it cannot."""
        from encoders.transformers_media.sound import sound_of

        return sound_of(self.path, self.pad, self.video)

    @property
    def can_read_sound(self) -> bool:
        """True if the model's processor writes videos with sound."""
        try:
            return self.reads_videos and bool(self.video_sound())
        except EncoderError:
            return False

    def faults(self) -> list[tuple[str, str]]:
        if faults := super().faults() or self.video_faults():
            return faults
        if self.sound and not self.reads_videos:
            return [("sound", "is true, and the model reads videos as images: set it to false")]
        try:
            if self.sound:
                self.video_sound()
        except EncoderError as error:
            return [("sound", str(error))]
        return []

    def token_grid(self, *extent: int, merge: int = 1) -> Grid | None:
        if len(extent) == 2:
            return self.processor().grid(*extent)
        return self.videos().grid(*extent) if len(extent) == FRAMES else self.video_sound().grid(*extent)

    def image_sizes(self, *extent: int) -> "dict[str, torch.Tensor]":
        return self.processor().sizes(*extent)

    def describe_input(self, merge: int) -> tuple[str, str, str]:
        tokens = f"up to {self.most_tokens()} of 1024 x 1024 pixels"
        return "by its processor", "not known", tokens


@dataclass
class MediaAudio(AudioItems, MediaSpec):
    """The audio side of a model of `transformers`."""

    name: str = "media_audio"
    family: str = "media_audio"

    def most_tokens(self, merge: int = 1) -> int:
        return self.num_tokens(int(self.max_seconds * 1000), 1000)
