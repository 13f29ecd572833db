"""Sizes of the encoders of Whisper and Qwen2-Audio, and the arithmetic derived from them."""

import math
from dataclasses import dataclass
from typing import ClassVar

from encoders.base import LayeredSpec
from encoders.errors import EncoderError
from encoders.key_rules import MOST_LAYERS, MOST_WIDTH, FixedKeys, key


@dataclass
class WhisperSpec(FixedKeys, LayeredSpec):
    """A transformer over the log-mel spectrogram of an audio item (Radford et al. 2022, arXiv 2212.04356, section 2.2):
    two convolutions, the second with stride 2, sinusoidal positions, pre-norm layers, a final norm."""

    name: str = "whisper"
    """Free name, shown in tables."""
    family: str = "whisper"
    """Family of encoders, whose code builds it."""
    sample_rate: int = key(16000, at_least=1, at_most=2**20)
    """Samples per second that audio is resampled to."""
    max_seconds: float = key(30.0, above=0, at_most=86400)
    """Longest audio, in seconds. A sample with a longer one is bad."""
    pad_clips: bool = False
    """Pad audio with silence to `max_seconds`, as Whisper was trained."""
    num_mels: int = key(80, at_least=1, at_most=4096)
    """Mel bands."""
    window: int = key(400, at_least=1, at_most=2**20)
    """Samples of a window of the Fourier transform. Must be below 4 times `hop`."""
    hop: int = key(160, at_least=1, at_most=2**20)
    """Samples between windows. Two windows make one frame."""
    hidden_size: int = key(768, at_least=1, at_most=MOST_WIDTH)
    """Width of the residual stream. Must be even."""
    num_layers: int = key(12, at_least=1, at_most=MOST_LAYERS)
    """Transformer layers."""
    num_attention_heads: int = key(12, at_least=1, at_most=MOST_WIDTH)
    """Attention heads."""
    ffn_hidden_size: int = key(3072, at_least=1, at_most=MOST_WIDTH)
    """Width of the feed-forward block."""
    normalization: str = "LayerNorm"
    """`LayerNorm` or `RMSNorm`."""
    layernorm_epsilon: float = key(1e-5, above=0, below=1)
    """Epsilon of every norm."""
    activation: str = "gelu"
    """`gelu`, `gelu_tanh`, `quick_gelu`, `relu`, `silu`, or `swiglu` (gated)."""
    key_bias: bool = True
    """Keys have a bias. Whisper's have none, which changes no output."""
    dropout: float = key(0.0, at_least=0, below=1)
    """Dropout probability of hidden states and attention."""
    init_std: float = key(0.02, at_least=0, at_most=1000)
    """Standard deviation of the initial weights."""

    kind: ClassVar[str] = "audio"
    medium: ClassVar[str] = "clip"
    placeholder: ClassVar[str] = "<audio>"

    @property
    def frame(self) -> int:
        """Samples of one frame, as the layers see it."""
        return 2 * self.hop

    @property
    def max_samples(self) -> int:
        """Samples of the longest audio."""
        return math.floor(round(self.max_seconds * self.sample_rate, 6))  # 1.1 * 1600 is a little above 1760

    @property
    def sizes_vary(self) -> bool:
        return not self.pad_clips

    def input_size(self, samples: int, rate: int, merge: int = 1) -> tuple[int, int]:
        """Return (samples, samples per second) of the encoder's input: resampled, and padded with silence to whole
        tokens. Raise EncoderError if it is longer than `max_seconds`."""
        length = -(-samples * self.sample_rate // rate)
        if length > self.max_samples:
            raise EncoderError(
                f"its {samples / rate:.2f} seconds ({samples} samples at {rate} Hz) are more than "
                f"encoder.max_seconds {self.max_seconds:g}: cut the clip, or raise it"
            )
        unit = self.frame * merge
        if self.pad_clips:
            length = self.max_samples
        return max(1, -(-length // unit)) * unit, self.sample_rate

    def inner_tokens(self, samples: int, rate: int, merge: int = 1) -> int:
        """Return the frames of an audio item. Raise EncoderError as `input_size` does."""
        return self.input_size(samples, rate, merge)[0] // self.frame

    def num_tokens(self, samples: int, rate: int, merge: int = 1) -> int:
        return self.inner_tokens(samples, rate, merge) // merge

    def joined(self, merge: int) -> int:
        return merge

    def most_tokens(self, merge: int = 1) -> int:
        return max(1, -(-self.max_samples // (self.frame * merge)))

    def most_inner_tokens(self, merge: int = 1) -> int:
        return self.most_tokens(merge) * merge

    def token_unit(self, merge: int = 1) -> int:
        return self.most_inner_tokens(merge) if self.pad_clips else merge

    @property
    def token_unit_fields(self) -> tuple[str, ...]:
        fields = ("encoder.pad_clips", "encoder.max_seconds") if self.pad_clips else ()
        return (*fields, "projector.merge")

    def embedding_products(self) -> dict[str, int]:
        """Return {weight before the layers: its multiplications for one frame}."""
        hidden = self.hidden_size
        # Two windows make a frame, and a convolution sees three adjacent windows.
        return {"conv1.weight": 2 * 3 * self.num_mels * hidden, "conv2.weight": 3 * hidden * hidden}

    def describe_input(self, merge: int) -> tuple[str, str, str]:
        per_second, most = self.sample_rate / self.frame, self.most_tokens(merge)
        return (
            f"{self.sample_rate} samples a second, {'' if self.pad_clips else 'up to '}{self.max_seconds:g} s",
            f"{per_second:g} frames a second",
            f"always {most}" if self.pad_clips else f"{per_second / merge:g} a second, up to {most}",
        )

    def faults(self) -> list[tuple[str, str]]:
        faults = self.layer_faults()
        if faults:
            return faults
        if self.hidden_size % 2:
            faults.append(("hidden_size", f"sinusoidal positions need an even width, it is {self.hidden_size}"))
        if self.window >= 4 * self.hop:
            # Audio of one frame has 2 * hop samples, and is mirrored by half a window at its ends.
            faults.append(("window", f"{self.window} samples must be below 4 times hop {self.hop}: change one of them"))
        if self.num_mels > self.window // 2:
            faults.append(
                ("num_mels", f"{self.num_mels} bands are more than half of window {self.window}: change one of them")
            )
        return faults

    def joint_faults(self, merge: int) -> list[tuple[str, str]]:
        """Return no errors: any merge is supported."""
        return []

    def num_parameters(self) -> int:
        convolutions = 3 * self.num_mels * self.hidden_size + 3 * self.hidden_size**2 + 2 * self.hidden_size
        return convolutions + self.num_layers * self.layer_parameters + self.norm_parameters


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
