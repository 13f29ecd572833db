"""Sizes of the audio transformer of Qwen2-Audio, and the arithmetic derived from them."""

from dataclasses import dataclass

from encoders.errors import EncoderError
from encoders.key_rules import MOST_LAYERS, MOST_WIDTH, key
from encoders.native.whisper.spec import WhisperSpec

POOLED = 2
"""Frames whose mean is one feature."""


@dataclass
class QwenAudioSpec(WhisperSpec):
    """The audio transformer of Qwen2-Audio (Chu et al. 2024, arXiv 2407.10759, section 2): Whisper's encoder without
    padding, then the mean of every two frames, then the final norm. An odd last frame gives no feature."""

    name: str = "qwen_audio"
    family: str = "qwen_audio"
    pad_clips: bool = False
    """`false` only."""
    padded_seconds: float = key(30.0, above=0, at_most=86400)
    """Seconds to which the spectrogram is padded with silence."""
    num_mels: int = key(128, at_least=1, at_most=4096)
    hidden_size: int = key(1280, at_least=1, at_most=MOST_WIDTH)
    num_layers: int = key(32, at_least=1, at_most=MOST_LAYERS)
    num_attention_heads: int = key(20, at_least=1, at_most=MOST_WIDTH)
    ffn_hidden_size: int = key(5120, at_least=1, at_most=MOST_WIDTH)
    key_bias: bool = False

    def input_size(self, samples: int, rate: int, merge: int = 1) -> tuple[int, int]:
        """Return (samples, samples per second) of the encoder's input: resampled, and padded with silence to a whole
        frame, or to a whole token if `merge` is above 1. Raise EncoderError if it is longer than `max_seconds`, or too
        short for a token."""
        unit = 1 if merge == 1 else self.joined(merge)
        length, rate_here = super().input_size(samples, rate, unit)
        if length // self.frame < POOLED:
            raise EncoderError(
                f"its {length // self.frame} frame of {self.frame} samples makes no token, which is the mean of "
                f"{POOLED}: leave the clip out"
            )
        return length, rate_here

    def num_tokens(self, samples: int, rate: int, merge: int = 1) -> int:
        return self.inner_tokens(samples, rate, merge) // self.joined(merge)

    def joined(self, merge: int) -> int:
        return POOLED * merge

    def joined_width(self, merge: int) -> int:
        return self.hidden_size * merge

    def most_tokens(self, merge: int = 1) -> int:
        return self.most_inner_tokens(merge) // self.joined(merge)

    def most_inner_tokens(self, merge: int = 1) -> int:
        return self.input_size(self.max_samples, self.sample_rate, merge)[0] // self.frame

    def token_unit(self, merge: int = 1) -> int:
        """Return a divisor of the number of frames of any audio item. It counts pairs of frames, so that
        sequence-parallel ranks have both frames of a pair."""
        return merge

    def describe_input(self, merge: int) -> tuple[str, str, str]:
        read_as, frames, _ = super().describe_input(merge)
        per_second = self.sample_rate / self.frame / self.joined(merge)
        return read_as, frames, f"{per_second:g} a second, up to {self.most_tokens(merge)}"

    def faults(self) -> list[tuple[str, str]]:
        faults = super().faults()
        if faults:
            return faults
        if self.pad_clips:
            faults.append(("pad_clips", "must be false: silence behind a clip takes no tokens in this family"))
        if self.max_samples <= self.frame:
            text = f"{self.max_seconds:g} seconds are not {POOLED} frames of {self.frame} samples: raise it"
            faults.append(("max_seconds", text))
        if self.padded_seconds < self.max_seconds:
            text = f"{self.padded_seconds:g} is below max_seconds {self.max_seconds:g}: raise it to at least that"
            faults.append(("padded_seconds", text))
        return faults
