"""The audio transformer of Qwen2-Audio of Megatron-Core layers.

Shape suffixes as in `encoders.whisper.model`.
"""

from typing import Any

import torch
import torch.nn.functional as F

from encoders.qwen_audio.spec import POOLED, QwenAudioSpec
from encoders.staged import Size
from encoders.whisper.model import WhisperEncoder


class QwenAudioEncoder(WhisperEncoder):
    """Clips -> features per pair of frames, joined `merge` by `merge`: what one pipeline stage has of it."""

    spec: QwenAudioSpec

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.is_last_stage:
            self.layers.final_layernorm.register_forward_pre_hook(_mean_of_pairs)

    def _embed(self, media: torch.Tensor) -> torch.Tensor:
        """Clips of one length, [N, W] -> the input of the first layer, [N, T, H]."""
        spec, length = self.spec, media.size(1)
        # As far as the convolutions and the window of the last frame reach, and the spectrogram mirrors silence alone.
        reach = 2 * spec.frame
        silence = max(0, min(round(spec.padded_seconds * spec.sample_rate) - length, reach))
        return super()._embed(F.pad(media, (0, silence)))[:, : self._tokens((length, spec.sample_rate))]

    def _features(self, hidden_NTH: torch.Tensor, size: Size) -> torch.Tensor:
        """Each `merge` neighbouring features, of pairs of frames already, side by side."""
        return hidden_NTH.unflatten(1, (-1, self.merge)).flatten(2)


def _mean_of_pairs(_norm: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """The input of the final norm, [T, N, H] -> [T / 2, N, H]."""
    hidden_TNH = inputs[0]
    pairs = len(hidden_TNH) // POOLED
    return (hidden_TNH[: POOLED * pairs].unflatten(0, (pairs, POOLED)).mean(1),)
