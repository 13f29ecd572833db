"""Which frames of a video are read as images, from its length alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from data.index.shard_index import Frame, Member
from data.records.conversation import Visual

_ROUNDING = 1e-9
"""More than what the products of lengths and rates are off by."""


@dataclass(frozen=True)
class Sampling:
    """`data.video`: how many images a video becomes. They are those in the middle of so many equal parts of it."""

    frames_per_second: float = 1.0
    """Images of a second."""
    max_frames: int = 32
    """Most images of a video, of which longer ones have fewer a second."""

    def count(self, milliseconds: int) -> int:
        """Images of a video of this length, at least one."""
        return int(self.counts(np.array([milliseconds], dtype=np.int64))[0])

    def counts(self, milliseconds: np.ndarray) -> np.ndarray:
        """`count` of many, int64."""
        # Bounded before they become whole numbers; 0.3 a second of 10 seconds are 3, and not 2.9999.
        found = np.minimum(milliseconds * self.frames_per_second / 1000, self.max_frames)
        return np.maximum((found + _ROUNDING).astype(np.int64), 1)


SAMPLING = Sampling()
"""That a config begins with."""


def images_of(members: Iterable[Member], sampling: Sampling) -> list[Member]:
    """The members that images are read from, each video once for every image of it; one without a readable header
    once."""
    found: list[Member] = []
    for member in members:
        if member.kind == "image" or (member.kind == "video" and not member.milliseconds):
            found.append(member)
        elif member.kind == "video":
            count = sampling.count(member.milliseconds)
            found += [member._replace(frame=Frame(number, count)) for number in range(count)]
    return found


def places_of(images: Sequence[Member]) -> tuple[Visual, ...]:
    """The images and videos behind what `images_of` gives, in their order."""
    return tuple(
        Visual(member.extension, member.frame.of if member.frame else 0)
        for member in images
        if member.frame is None or member.frame.number == 0
    )
