"""How large the parts of a sample may be. A header can claim any size: a picture of 65,535 x 65,535 pixels is some
hundred bytes of JPEG and 13 GB decoded. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bounds:
    """What is above is a bad sample, with its number and the bound: config keys `data.bounds.NAME`."""

    pixels: int = 100_000_000
    """Of one picture, those of videos too; also of what its middle is cut out of, and of a square around it."""
    seconds: float = 3600.0
    """Of one clip or video."""
    sample_rate: int = 384_000
    """Of a clip, samples a second."""
    video_bytes: int = 1_073_741_824
    """Of one video."""
    video_frames: int = 1_000_000
    """Of the pictures that one video has, whether they are read or not."""
    video_pixels: int = 100_000_000_000
    """Decoded of one video: those of pictures between the ones that are read, too."""
    record_bytes: int = 16_777_216
    """Of a `json` or `txt` member."""
    record_depth: int = 64
    """Of lists and objects inside each other in a record."""
    turns: int = 1000
    """Of a conversation."""
    placeholders: int = 4096
    """Pictures and clips of a sample; a video is as many as are read of it."""

    def of_picture(self, height: int, width: int) -> str | None:
        """What is too large of a picture; None if nothing is."""
        pixels = height * width
        return None if pixels <= self.pixels else self._above(f"{height} x {width} pixels are", pixels, "pixels")

    def of_resized(self, height: int, width: int) -> str | None:
        """What is too large of a picture that is made of another before a part of it is read; None if nothing is."""
        pixels = height * width
        if pixels <= self.pixels:
            return None
        return self._above(f"read as a part of {height} x {width} pixels, these are", pixels, "pixels")

    def of_clip(self, frames: int, rate: int) -> str | None:
        """What is too large of a clip of `frames` samples per channel at `rate` a second; None if nothing is."""
        return self._above("its rate in Hz is", rate, "sample_rate") or self._above(
            "its length in seconds is", frames / rate, "seconds"
        )

    def of_video(self, size: int, milliseconds: int) -> str | None:
        """What is too large of a video of `size` bytes, before any is decoded; None if nothing is."""
        return self._above("its bytes are", size, "video_bytes") or self._above(
            "its length in seconds is", milliseconds / 1000, "seconds"
        )

    def of_frames(self, number: int) -> str | None:
        """What is wrong with a video of that many pictures; None if nothing is."""
        return self._above("its pictures are", number, "video_frames")

    def of_video_pixels(self, number: int) -> str | None:
        """What is wrong with that many pixels that are decoded of a video; None if nothing is."""
        return self._above("to read it, pixels are decoded:", number, "video_pixels")

    def of_record(self, size: int) -> str | None:
        """What is wrong with a record of `size` bytes; None if nothing is."""
        return self._above("its bytes are", size, "record_bytes")

    def of_turns(self, number: int) -> str | None:
        """What is wrong with that many turns; None if nothing is."""
        return self._above("its turns are", number, "turns")

    def of_placeholders(self, number: int) -> str | None:
        """What is wrong with that many pictures and clips; None if nothing is."""
        return self._above("its pictures and clips are", number, "placeholders")

    def _above(self, what: str, value: float, name: str) -> str | None:
        bound = getattr(self, name)
        return f"{what} {value:.10g}, above data.bounds.{name} {bound:.10g}" if value > bound else None


BOUNDS = Bounds()
"""Those that a config begins with."""
