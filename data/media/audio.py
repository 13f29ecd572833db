"""Decode audio files to tensors at any sampling rate.

Resampling equals torchaudio's. torchaudio 2.11 stores a filter for every phase of the two rates: 6.7 GB for 44,101 ->
16,000 Hz. Instead of large tables, the same windowed sinc is evaluated directly.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from data.errors import DecodeError, reason_of
from data.media.audio_files import mono_blocks
from data.media.options import BOUNDS, Bounds

_LOBES, _ROLLOFF = 6, 0.99  # torchaudio's `lowpass_filter_width` and `rolloff`
_LARGEST_TABLE = 1 << 20  # numbers in the filters of all phases
_PIECE = 1 << 20  # samples that are resampled at once
_AT_ONCE = 1 << 19  # numbers of filters in memory, without a table


def decode_audio(raw: bytes, rate: int, samples: int | None = None, bounds: Bounds = BOUNDS) -> torch.Tensor:
    """Return an audio file as float32 [samples], mono (the mean of its channels), at `rate` samples per second.

    Integers of any width are divided by their largest magnitude, so FLAC and WAV of one recording give equal numbers in
    [-1, 1). Floats stay as they are, even above 1.

    Args:
        samples: length to cut or zero-pad to; None keeps that of the file.

    Raises:
        DecodeError: it is damaged, or above its bounds.
        MemoryShortage, MissingLibrary: this machine cannot decode it.
    """
    import soundfile

    blocks, frames, file_rate = [], 0, 0
    try:
        for block, block_rate in mono_blocks(raw, bounds):
            frames += len(block)
            if block_rate != (file_rate or block_rate):
                raise DecodeError(f"its parts have different rates ({file_rate} and {block_rate} Hz)")
            if above := bounds.of_clip(frames, block_rate):
                raise DecodeError(above)
            blocks.append(block)
            file_rate = block_rate
    except DecodeError:
        raise
    except soundfile.LibsndfileError as error:  # its text would name the opened object
        raise DecodeError(f"cannot decode {len(raw)} bytes of audio: {error.error_string}") from error
    except Exception as error:  # RuntimeError and others mean the same
        raise DecodeError(f"cannot decode {len(raw)} bytes of audio: {reason_of(error)}") from error
    if not frames:
        raise DecodeError(f"no audio in {len(raw)} bytes")
    mono = np.concatenate(blocks)
    if not np.isfinite(mono).all():
        raise DecodeError(f"{len(raw)} bytes of audio hold samples that are not finite")
    wave = torch.from_numpy(mono)
    if file_rate != rate:
        wave = resampled(wave, file_rate, rate)
    if samples is not None:
        wave = torch.nn.functional.pad(wave[:samples], (0, max(samples - len(wave), 0)))
    return wave


def resampled(wave: torch.Tensor, rate: int, wanted: int) -> torch.Tensor:
    """Resample float32 [samples] from `rate` to `wanted` Hz: to `ceil(samples * wanted / rate)` samples."""
    common = math.gcd(rate, wanted)
    rate, wanted = rate // common, wanted // common
    if rate == wanted:
        return wave
    if wanted * (rate + 2 * _radius(rate, wanted)) <= _LARGEST_TABLE:
        return _in_pieces(wave, rate, wanted)
    return torch.from_numpy(_evaluated(wave.numpy(), rate, wanted))


def _in_pieces(wave: torch.Tensor, rate: int, wanted: int) -> torch.Tensor:
    """Resample with torchaudio in overlapping pieces, since it takes several times the audio's memory."""
    from torchaudio.functional import resample

    if len(wave) <= _PIECE:
        return resample(wave, rate, wanted)
    out = torch.empty(-(-len(wave) * wanted // rate))
    # Pieces start at multiples of `rate`, where both rates have a sample.
    each, around = max(_PIECE // rate, 1), -(-_radius(rate, wanted) // rate) + 1
    for first in range(0, -(-len(wave) // rate), each):
        before = min(first, around)
        piece = resample(wave[(first - before) * rate : (first + each + around) * rate], rate, wanted)
        own = piece[before * wanted : (before + each) * wanted]
        out[first * wanted : first * wanted + len(own)] = own
    return out


def _radius(rate: int, wanted: int) -> int:
    """Return how many samples on either side contribute to one."""
    return math.ceil(_LOBES * rate / (min(rate, wanted) * _ROLLOFF))


def _evaluated(wave: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """Return the sum over i of wave[i] * scale * sinc(t) * cos(pi t / 12)^2, t = (i - p) * scale, at p = n * rate /
    wanted.

    |t| is at most 6; scale is min(rate, wanted) / rate times the roll-off. It is torchaudio.functional.resample with
    `sinc_interp_hann`.
    """
    radius, scale = _radius(rate, wanted), min(rate, wanted) * _ROLLOFF / rate
    taps = np.arange(-radius, radius + 2)
    padded = np.pad(wave, (radius, radius + 2))
    out = np.empty(-(-len(wave) * wanted // rate), dtype=np.float32)
    step = max(_AT_ONCE // len(taps), 1)
    for first in range(0, len(out), step):
        places = np.arange(first, min(first + step, len(out)), dtype=np.int64) * rate
        whole, part = np.divmod(places, wanted)
        t = ((taps - (part / wanted)[:, None]) * scale).clip(-_LOBES, _LOBES)
        filters = np.sinc(t) * np.cos(t * (math.pi / _LOBES / 2)) ** 2 * scale
        out[first : first + len(whole)] = (padded[(whole + radius)[:, None] + taps] * filters).sum(axis=1)
    return out
