"""Another sampling rate, for any two: torchaudio's filter, in bounded memory.

torchaudio 2.11 keeps a filter for every phase of the two rates: for 44,101 -> 16,000 Hz, which have no common factor,
6.7 GB. Where its filters are few they are taken; else the same windowed sinc is evaluated where it is needed.
"""

from __future__ import annotations

import math

import numpy as np
import torch

_LOBES, _ROLLOFF = 6, 0.99  # torchaudio's `lowpass_filter_width` and `rolloff`
_LARGEST_TABLE = 1 << 20  # numbers in the filters of all phases
_PIECE = 1 << 20  # samples of a clip that are resampled at once
_AT_ONCE = 1 << 19  # numbers of filters in memory, without a table


def resampled(wave: torch.Tensor, rate: int, wanted: int) -> torch.Tensor:
    """float32 [samples] of `rate` samples a second -> the same of `wanted`, of `ceil(samples * wanted / rate)`."""
    common = math.gcd(rate, wanted)
    rate, wanted = rate // common, wanted // common
    if rate == wanted:
        return wave
    if wanted * (rate + 2 * _radius(rate, wanted)) <= _LARGEST_TABLE:
        return _in_pieces(wave, rate, wanted)
    return torch.from_numpy(_evaluated(wave.numpy(), rate, wanted))


def _in_pieces(wave: torch.Tensor, rate: int, wanted: int) -> torch.Tensor:
    """torchaudio's resampling, which takes several times the clip's memory, piece by piece: each with as much around it
    as a sample is made of."""
    from torchaudio.functional import resample

    if len(wave) <= _PIECE:
        return resample(wave, rate, wanted)
    out = torch.empty(-(-len(wave) * wanted // rate))
    # Pieces begin where a sample of either rate does: at multiples of `rate`, of which `wanted` are made.
    each, around = max(_PIECE // rate, 1), -(-_radius(rate, wanted) // rate) + 1
    for first in range(0, -(-len(wave) // rate), each):
        before = min(first, around)
        piece = resample(wave[(first - before) * rate : (first + each + around) * rate], rate, wanted)
        own = piece[before * wanted : (before + each) * wanted]
        out[first * wanted : first * wanted + len(own)] = own
    return out


def _radius(rate: int, wanted: int) -> int:
    """Samples on either side that a sample is made of."""
    return math.ceil(_LOBES * rate / (min(rate, wanted) * _ROLLOFF))


def _evaluated(wave: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """sum over i of wave[i] * scale * sinc(t) * cos(pi t / 12)^2, t = (i - p) * scale, at p = n * rate / wanted; |t| is
    at most 6, scale the lower rate's share of the higher, times the roll-off. (torchaudio.functional.resample with
    `sinc_interp_hann`.)"""
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
