"""Keys of encoders that read videos by the processor of their directory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from encoders.errors import EncoderError
from encoders.key_rules import key

if TYPE_CHECKING:
    import numpy as np
    import torch

    from encoders.transformers_media.videos import VideoProcessor

FRAMES = 5
"""Numbers in the extent of a video that describe its frames. A sixth is the length of its sound in milliseconds."""


@dataclass
class VideoKeys:
    """Base of their specs. The extent of a video is (height, width, frames, numerator and denominator of the frames per
    second); if its sound is read, also the milliseconds of sound."""

    path: str = ""
    """Directory of the model, with its processor. `pretrained` sets this."""
    pad: int = key(-1, at_least=-1)
    """Id of the tokens that features replace."""
    reads_videos: bool = False
    """The model reads videos as such: frames that its processor chooses, with their times. False: as images."""
    video: dict[str, Any] = key(factory=dict, above=0)
    """Options of the model's video processor, such as `{fps: 2, max_frames: 64}`. See docs/data.md#videos."""

    if TYPE_CHECKING:

        def output_tokens(self, *extent: int) -> int:
            """Return the tokens of an item in the sequence."""

        def image_sizes(self, *extent: int) -> dict[str, torch.Tensor]:
            """Return the arguments of the class by which it computes positions, of an image."""

    def videos(self) -> "VideoProcessor":
        """Return the video half of the processor. Raise EncoderError if it cannot be used."""
        from encoders.transformers_media.videos import videos_of

        return videos_of(self.path, self.pad, self.video)

    def video_frames(self, *extent: int) -> Sequence[int]:
        """Return the numbers of the frames that are read of a video."""
        return self.videos().frames(*extent[:FRAMES])

    def video_faults(self) -> list[tuple[str, str]]:
        """Return the config errors of these keys."""
        if self.video and not self.reads_videos:
            return [("video", "is set, and the model reads videos as images: set data.video instead")]
        if self.reads_videos and not self.path:
            return [("reads_videos", "is true, and path is empty: only the processor of a directory reads videos")]
        try:
            if self.reads_videos:
                self.videos()
        except EncoderError as error:
            return [("video" if self.video else "reads_videos", str(error))]
        return []

    def positions(self, ids: "np.ndarray", extents: Sequence[tuple[int, ...]]) -> "np.ndarray":
        """Return positions as the model's class computes them, int64 [axes, S].

        Args:
            ids: tokens of a text, int64 [S].
            extents: those of its images and videos; empty: its tokens count as text.
        """
        import numpy as np
        import torch

        from encoders.transformers_media.directory import positions

        kinds, sizes = np.zeros(len(ids), dtype=np.int64), dict[str, list[torch.Tensor]]()
        pads, at = np.flatnonzero(ids == self.pad), 0
        for extent in extents:
            is_image = len(extent) == 2
            for name, value in (self.image_sizes(*extent) if is_image else self.videos().sizes(*extent)).items():
                sizes.setdefault(name, []).append(value)
            rows = self.output_tokens(*extent)
            kinds[pads[at : at + rows]] = 1 if is_image else 2
            at += rows
        joined = {name: torch.cat(values) for name, values in sizes.items()}
        return positions(self.path, ids.tolist(), kinds.tolist(), joined).numpy()
