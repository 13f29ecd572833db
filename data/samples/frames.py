"""Select a video's frames, by its length alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from data.index.shard_index import Frame, Member
from data.records.conversation import Visual

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


def images_of(members: Iterable[Member], sampling: Sampling) -> list[Member]:
    """Return the image members, with each video once for every frame, or once without a readable header."""
    images: list[Member] = []
    for member in members:
        if member.kind == "image" or (member.kind == "video" and not member.milliseconds):
            images.append(member)
        elif member.kind == "video":
            count = sampling.count(member.milliseconds)
            images += [member._replace(frame=Frame(number, count)) for number in range(count)]
    return images


def places_of(images: Sequence[Member]) -> tuple[Visual, ...]:
    """Return the images and videos behind `images_of`, in order."""
    return tuple(
        Visual(member.extension, member.frame.of if member.frame else 0)
        for member in images
        if member.frame is None or member.frame.number == 0
    )
