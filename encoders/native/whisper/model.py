"""An audio transformer of Megatron-Core layers: log-mel spectrogram -> two convolutions + positions -> layers -> norm.

The architecture is that of Whisper (Radford et al. 2022, arXiv 2212.04356; github.com/openai/whisper, audio.py and
model.py), but audio keeps its length. Items of equal length are embedded together, and none sees another's padding.

Shape suffixes: N audio items, W samples, B frequency or mel bands, F windows, T frames inside the encoder, H hidden
size, R rows: frames of all items.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

from encoders.initial_weights import bare_layer, draw_weights
from encoders.native.whisper.spec import POOLED, QwenAudioSpec, WhisperSpec
from encoders.staged import Size, StagedEncoder, by_size, stacked

LEAST_POWER = 1e-10
"""Powers are clamped to this before the logarithm."""

DYNAMIC_RANGE = 8.0
"""Powers of ten below an item's loudest value at which the spectrogram ends."""


class WhisperEncoder(StagedEncoder):
    """One pipeline stage: audio -> features per frame, joined `merge` by `merge`."""

    spec: WhisperSpec

    def forward(
        self,
        waveforms: torch.Tensor | Sequence[torch.Tensor] | None = None,
        sizes: Sequence[Size] | None = None,
        hidden_states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run this stage on the audio.

        Args:
            waveforms: on the first stage: float32 [N, W], or [W] of each item, with `WhisperSpec.input_size` samples.
            sizes: on later stages: (samples, samples per second) of each item.
            hidden_states: on later stages: the output of the previous stage.

        Returns:
            Rows in the order of the items. On the last stage features [N * T / merge, H * merge]; before it the frames
            inside the encoder, [R, H].
        """
        if not sizes:
            assert waveforms is not None, "the first stage gets clips, the others their sizes"
            sizes = [(len(wave), self.spec.sample_rate) for wave in waveforms]
        return self._run(waveforms, sizes, hidden_states)

    def _build_embeddings(self) -> None:
        spec, config = self.spec, self.config
        torch.manual_seed(config.init_seed)
        options = {"kernel_size": 3, "padding": 1, "dtype": config.params_dtype}
        self.conv1 = bare_layer(torch.nn.Conv1d, spec.num_mels, spec.hidden_size, **options)
        self.conv2 = bare_layer(torch.nn.Conv1d, spec.hidden_size, spec.hidden_size, stride=2, **options)
        for convolution in (self.conv1, self.conv2):
            draw_weights(convolution, spec.init_std, config)
        self.register_buffer("window", torch.hann_window(spec.window), persistent=False)
        self.register_buffer("mel_filters", mel_filters(spec), persistent=False)

    def _embed(self, media: torch.Tensor | Sequence[torch.Tensor], sizes: Sequence[Size]) -> torch.Tensor:
        """Embed audio as the input of the first layer, [R, H]. Items of one length are adjacent."""
        if isinstance(media, torch.Tensor):
            return self._embed_alike(media).flatten(0, 1)
        alike = [stacked([media[member] for member in members]) for members in by_size(sizes).values()]
        return torch.cat([self._embed_alike(waves_NW).flatten(0, 1) for waves_NW in alike])

    def _embed_alike(self, waves_NW: torch.Tensor) -> torch.Tensor:
        """Embed audio of one length, [N, W], as the input of the first layer, [N, T, H]."""
        mels_NBF = log_mel_spectrogram(waves_NW, self.window, self.mel_filters, self.spec.hop)
        hidden_NHT = F.gelu(self.conv2(F.gelu(self.conv1(mels_NBF.to(self.conv1.weight.dtype)))))
        hidden_NTH = hidden_NHT.transpose(1, 2)
        positions_TH = sinusoids(hidden_NTH.size(1), hidden_NTH.size(2), hidden_NTH.device)
        return hidden_NTH + positions_TH.to(hidden_NTH.dtype)

    def _features(self, rows_RH: torch.Tensor) -> torch.Tensor:
        """Place each `merge` adjacent frames side by side."""
        return rows_RH.unflatten(0, (-1, self.merge)).flatten(1)

    def _tokens(self, size: Size) -> int:
        return size[0] // self.spec.frame


def mel_filters(spec: WhisperSpec) -> torch.Tensor:
    """Return weights [window / 2 + 1, num_mels] of frequencies in mel bands: Slaney's scale, bands of equal area."""
    from torchaudio.functional import melscale_fbanks  # runs without audio read this module too, for `sinusoids`

    return melscale_fbanks(
        spec.window // 2 + 1,
        f_min=0.0,
        f_max=spec.sample_rate / 2,
        n_mels=spec.num_mels,
        sample_rate=spec.sample_rate,
        norm="slaney",
        mel_scale="slaney",
    )


def log_mel_spectrogram(waves_NW: torch.Tensor, window: torch.Tensor, filters: torch.Tensor, hop: int) -> torch.Tensor:
    """Return the spectrogram of audio of one length, in float32: [N, mel bands, W / hop].

    As Whisper's `log_mel_spectrogram`: power of the Fourier transform in Hann windows around every `hop`-th sample (the
    ends are mirrored, the last window is dropped), in mel bands, log10, at most `DYNAMIC_RANGE` below each item's own
    loudest value, then (x + 4) / 4.
    """
    spectrum_NBF = torch.stft(
        waves_NW.float(), len(window), hop, window=window, center=True, pad_mode="reflect", return_complex=True
    )
    power_NBF = spectrum_NBF[..., :-1].abs().square()
    mels_NBF = (filters.T @ power_NBF).clamp(min=LEAST_POWER).log10()
    mels_NBF = torch.maximum(mels_NBF, mels_NBF.amax(dim=(1, 2), keepdim=True) - DYNAMIC_RANGE)
    return (mels_NBF + 4) / 4


def sinusoids(length: int, width: int, device: torch.device) -> torch.Tensor:
    """Return positions [length, width] in float32: sines, then cosines, of wavelengths from 2 pi to 10000 * 2 pi
    (Whisper's `sinusoids`)."""
    half = width // 2
    rates = torch.exp(-math.log(10000) / max(half - 1, 1) * torch.arange(half, device=device))
    angles = torch.arange(length, device=device)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


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
