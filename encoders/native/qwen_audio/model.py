"""The audio transformer of Qwen2-Audio, of Megatron-Core layers. Shape suffixes as in
`encoders.native.whisper.model`."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

from encoders.native.qwen_audio.spec import POOLED, QwenAudioSpec
from encoders.native.whisper.model import WhisperEncoder
from encoders.staged import Size


class QwenAudioEncoder(WhisperEncoder):
    """One pipeline stage: audio -> features per pair of frames, joined `merge` by `merge`."""

    spec: QwenAudioSpec

    def _embed_alike(self, waves_NW: torch.Tensor) -> torch.Tensor:
        """Embed audio of one length, [N, W], as the input of the first layer, [N, T, H]."""
        spec, length = self.spec, waves_NW.size(1)
        # Enough for the convolutions and the last frame's window, so that the spectrogram mirrors only silence.
        reach = 2 * spec.frame
        silence = max(0, min(round(spec.padded_seconds * spec.sample_rate) - length, reach))
        return super()._embed_alike(F.pad(waves_NW, (0, silence)))[:, : self._tokens((length, spec.sample_rate))]

    def _last_tokens(self, size: Size) -> int:
        return self._tokens(size) // POOLED

    def _run_layers(self, rows_RH: torch.Tensor, sizes: Sequence[Size]) -> torch.Tensor:
        if not self.is_last_stage:
            return super()._run_layers(rows_RH, sizes)
        frames = [self._tokens(size) for size in (sizes[:1] if self._is_batch(sizes) else sizes)]
        norm = self.layers.final_layernorm
        pooling = norm.register_forward_pre_hook(partial(_mean_of_pairs, frames))
        try:
            return super()._run_layers(rows_RH, sizes)
        finally:
            pooling.remove()


def _mean_of_pairs(frames: Sequence[int], _norm: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """Average the input of the final norm in pairs, [S, B, H] -> [S / 2, B, H]. `frames` has the frames of each audio
    item; with sequence parallelism, all are even."""
    hidden_SBH = inputs[0]
    if any(count % POOLED for count in frames):
        hidden_SBH = torch.cat([clip[: len(clip) // POOLED * POOLED] for clip in hidden_SBH.split(list(frames))])
    return (hidden_SBH.unflatten(0, (-1, POOLED)).mean(1),)
