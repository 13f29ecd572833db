"""Keys of media: what is read of them, and how large they may be. Imports no torch."""

from dataclasses import dataclass

from data.media.bounds import BOUNDS
from data.samples.frames import SAMPLING
from mimo_train.config.keys import Section, key


@dataclass
class VideoConfig(Section):
    """How many pictures a video becomes: those in the middle of so many equal parts of it. See docs/data.md#videos."""

    frames_per_second: float = key(SAMPLING.frames_per_second, above=0, at_most=1000)
    """Pictures of a second; at least one of a video."""
    max_frames: int = key(SAMPLING.max_frames, at_least=1, at_most=2**16)
    """Most pictures of a video. Longer ones have fewer a second."""


@dataclass
class BoundsConfig(Section):
    """How large the parts of a sample may be: what is above is a bad sample. See docs/data.md#bounds."""

    pixels: int = key(BOUNDS.pixels, at_least=1)
    """Of one picture, height times width; those of videos too. So too of what a picture is resized to before its middle
    is cut out (`resize: crop`), and of the square around one that is not cut into tiles (`cut_several: false`)."""
    seconds: float = key(BOUNDS.seconds, above=0)
    """Of one clip or video."""
    sample_rate: int = key(BOUNDS.sample_rate, at_least=1)
    """Of one clip, in Hz."""
    video_bytes: int = key(BOUNDS.video_bytes, at_least=1, at_most=2**60)
    """Of one video."""
    video_frames: int = key(BOUNDS.video_frames, at_least=1)
    """Of the pictures that one video has, whether they are read or not."""
    video_pixels: int = key(BOUNDS.video_pixels, at_least=1, at_most=2**60)
    """Decoded of one video: those of pictures between the ones that are read, too."""
    record_bytes: int = key(BOUNDS.record_bytes, at_least=1)
    """Of the `json` or `txt` member."""
    record_depth: int = key(BOUNDS.record_depth, at_least=1)
    """Lists and objects inside each other in a record."""
    turns: int = key(BOUNDS.turns, at_least=1)
    """Of a conversation."""
    placeholders: int = key(BOUNDS.placeholders, at_least=1)
    """Pictures and clips of a sample, together; a video is as many pictures as are read of it."""
