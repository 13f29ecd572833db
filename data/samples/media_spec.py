"""An encoder module's requirements on the images, videos or audio of a sample: their sizes, and the tokens they become.

`Media.sequence_tokens` is the number of tokens of an image in the language model. A run sets it from the specs of its
encoder and projector (`encoders.base.num_tokens`); `sample_meta` calls it for every sample, by the size in the index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from data.errors import DataError
from data.index.shard_index import Frame, Member
from data.media.options import STRETCHED, Bounds, Resize
from data.records.conversation import Visual
from data.text.placeholders import Grid, ItemText

if TYPE_CHECKING:
    import torch

type MediaInput = torch.Tensor | dict[str, Any]
"""An item as an encoder takes it: a tensor, or what the model's own processor makes of it."""
type Decode = Callable[[Sequence[int]], Iterable[torch.Tensor]]
"""Frame numbers of a video, ascending -> these frames, each uint8 [3, height, width]."""


@dataclass(frozen=True)
class Media:
    """An encoder module's requirements on a sample.

    The functions are pure. They take (height, width) of the original in pixels, (samples per channel, samples per
    second) of audio, or (height, width, frames, numerator and denominator of the frames per second) of a video that is
    one item, with `sound` also its milliseconds of sound, if it has any. They may raise ValueError for an item that the
    encoder rejects.
    """

    module: str
    kind: str  # "image" | "audio"
    placeholder: str
    sequence_tokens: Callable[..., int]
    """Tokens of one item in the sequence of the language model."""
    size: Callable[..., tuple[int, ...]]
    """The encoder's input: (height, width), (samples, samples per second), or the extent of a video."""
    inner_tokens: Callable[..., int] | None = None
    """Tokens of one item inside the encoder's layers; None: as many as in the sequence."""
    pairs: Callable[..., int] | None = None
    """Pairs of tokens of one item that attend to each other, in a layer on average; None: all."""
    pair_cost: float = 0.0
    """Cost of one of these pairs, relative to a token outside of attention."""
    resize: Resize = STRETCHED
    """How to resize an image to `size`."""
    grid: Callable[[int, int], Grid | None] | None = None
    """Rows and columns of an image's tokens, for M-RoPE language models, else None. It returns None without a grid."""
    positions: Callable[[np.ndarray, Sequence[tuple[int, ...]]], np.ndarray] | None = None
    """Positions of tokens, int64 [axes, S], by their ids and the extents of the module's items; None: by `grid`."""
    has_usual_grids: bool = False
    """True if `grid` gives the positions of samples without videos, and `positions` the others."""
    canvas: Callable[[int, int], tuple[int, int]] | None = None
    """(height, width) of the canvas that is cut into tiles; (0, 0): not cut. `size` is then the image's own."""
    cut_several: bool = True
    """True if images of a sample with several are cut into tiles too; else the functions get (0, 0) for them."""
    text: Callable[..., tuple[str, Sequence[int], str]] | None = None
    """`ItemText` of an item; the last argument is its number among the sample's items of this kind, from 0. None: only
    the tokens that features replace."""
    read: Callable[[torch.Tensor], dict[str, Any]] | None = None
    """The encoder's input of an item of `size`, by the model's own processor; None: the item itself."""
    video_frames: Callable[..., Sequence[int]] | None = None
    """Numbers of the frames that are read of a video, ascending; None: a video is a series of images (`Sampling`)."""
    read_video: Callable[[Decode, Sequence[int], Sequence[int]], list[MediaInput]] | None = None
    """The encoder's inputs of some parts of a video, by what decodes its frames, its extent, and numbers of parts."""
    sound: bool = False
    """The sound of videos is read too: it is an item of the one module of audio, and its tokens are in the text of the
    video, whose extent ends with the milliseconds of its sound."""
    video_parts: Callable[..., int] | None = None
    """Number of the parts of a video, each an input of `size` that is encoded independently; None: one."""
    identity: str = ""
    """Text that changes with everything that determines `text`; empty without it."""
    bidirectional: str = ""
    """Tokens that see each other: `items`, those of each item; `prefix`, those before the first answer."""
    types: tuple[int, ...] = ()
    """Ids of the tokens of an item that see each other; empty: only those that features replace."""

    def __post_init__(self) -> None:
        if self.kind not in ("image", "audio"):
            raise DataError(f"modules.{self.module}: media kind {self.kind!r} is neither 'image' nor 'audio'")

    @property
    def field(self) -> str:
        """The name of its tensor in a batch."""
        if self.read is not None:
            return "items"
        return "pixels" if self.kind == "image" else "waveforms"

    def extents(self, extents: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Return the functions' arguments for each item of this kind in a sample, from its extent."""
        if self.cut_several or sum(not is_video(extent) for extent in extents) < 2:
            return list(extents)
        return [extent if is_video(extent) else (0, 0) for extent in extents]

    def texts(self, pad: int, extents: Sequence[tuple[int, ...]], tokens: Sequence[int]) -> list[ItemText]:
        """Return the text of each item of this kind in a sample. `pad`: id of the tokens that features replace.
        `extents`: those of `extents`. `tokens`: number of tokens of each."""
        if self.text is None:
            return [ItemText("", [pad] * rows, "") for rows in tokens]
        numbers = {True: count(), False: count()}
        return [ItemText(*self.text(*extent, next(numbers[is_video(extent)]))) for extent in extents]

    def excess(self, size: tuple[int, ...], extent: tuple[int, ...], bounds: Bounds) -> str | None:
        """Return why an image of (height, width) `size` is too large during processing; None if it is not."""
        if self.kind == "audio" or is_video(extent):
            return None
        height, width = size
        return bounds.excess_of_extent("image", *self.resize.largest(height, width, cut=min(extent) > 0))

    def parts(self, extent: tuple[int, ...]) -> int:
        """Return the number of inputs of an item, each of which is encoded independently."""
        return self.video_parts(*extent) if self.video_parts is not None and is_video(extent) else 1

    def of_video(self, raw: bytes, extent: tuple[int, ...], bounds: Bounds, parts: Sequence[int]) -> list[MediaInput]:
        """Return the encoder's inputs of some parts of a video file. Raises DecodeError."""
        from data.media.video import decode_frames

        assert self.read_video is not None
        return self.read_video(lambda numbers: decode_frames(raw, numbers, bounds), extent, parts)

    def blanks(self, extent: tuple[int, ...], parts: Sequence[int]) -> list[MediaInput]:
        """Return the encoder's inputs of some parts of an empty item."""
        import torch

        if is_video(extent):
            assert self.read_video is not None
            frame = torch.zeros(3, *extent[:2], dtype=torch.uint8)
            return self.read_video(lambda numbers: [frame] * len(numbers), extent, parts)
        dtype = torch.uint8 if self.kind == "image" and self.resize.rounded else torch.float32
        zeros = torch.zeros(self._shape(extent), dtype=dtype)
        return [zeros if self.read is None else self.read(zeros)] * len(parts)

    def _shape(self, extent: tuple[int, ...]) -> tuple[int, ...]:
        first, second = self.size(*extent)
        if self.kind == "audio":
            return (first,)
        if self.canvas is None:
            return 3, first, second
        height, width = self.canvas(*extent)
        side = self.resize.tile
        return 1 + height * width // side**2, 3, side, side


def is_video(extent: Sequence[int]) -> bool:
    """True for the extent of a video that is read as one item."""
    return len(extent) > 2


_ROUNDING = 1e-9
"""Above the rounding errors of length times rate."""


@dataclass(frozen=True)
class Sampling:
    """`data.video`: a video's number of frames, one from the middle of each equal part."""

    frames_per_second: float = 1.0
    max_frames: int = 32
    """Maximum frames of a video; longer videos have fewer per second."""

    def count(self, milliseconds: int) -> int:
        """Return the number of frames of a video of this length, at least one."""
        return int(self.counts(np.array([milliseconds], dtype=np.int64))[0])

    def counts(self, milliseconds: np.ndarray) -> np.ndarray:
        """Return `count` of many lengths, int64."""
        # Bounded before the conversion to int64. 0.3 a second for 10 seconds must be 3, not 2.9999.
        counts = np.minimum(milliseconds * self.frames_per_second / 1000, self.max_frames)
        return np.maximum((counts + _ROUNDING).astype(np.int64), 1)


SAMPLING = Sampling()


def images_of(members: Iterable[Member], sampling: Sampling | None) -> list[Member]:
    """Return the images and videos, with each video once for every frame. It stays whole without a `sampling`, or
    without a readable header."""
    images: list[Member] = []
    for member in members:
        if member.kind == "video" and sampling is not None and member.milliseconds:
            frames = sampling.count(member.milliseconds)
            images += [member._replace(frame=Frame(number, frames)) for number in range(frames)]
        elif member.kind in ("image", "video"):
            images.append(member)
    return images


def audio_of(members: Iterable[Member]) -> list[Member]:
    """Return the audio items, the sound of videos included."""
    members = (member.as_sound if member.kind == "video" and member.sound else member for member in members)
    return [member for member in members if member.kind == "audio"]


def places_of(images: Sequence[Member]) -> tuple[Visual, ...]:
    """Return the images and videos behind `images_of`, in order."""
    return tuple(
        Visual(member.extension, member.frame.of if member.frame else 0, member.kind == "video" and not member.frame)
        for member in images
        if member.frame is None or member.frame.number == 0
    )
