"""Decode audio files to tensors at any sampling rate.

torchaudio resamples. It stores a filter for every phase of the two rates, 6.7 GB for 44,101 -> 16,000 Hz, so such rates
are rejected.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from data.errors import DecodeError, reason_of
from data.media.audio_files import mono_blocks
from data.media.options import BOUNDS, Bounds

_LOBES, _ROLLOFF = 6, 0.99  # torchaudio's `lowpass_filter_width` and `rolloff`
_LARGEST_TABLE = 1 << 24  # numbers in the filters of all phases
_PIECE = 1 << 20  # samples that are resampled at once


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
            if excess := bounds.excess("seconds", frames / block_rate):
                raise DecodeError(excess)
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
    """Resample float32 [samples] from `rate` to `wanted` Hz: to `ceil(samples * wanted / rate)` samples.

    Raises DecodeError if their filters would take too much memory.
    """
    from torchaudio.functional import resample

    common = math.gcd(rate, wanted)
    rate, wanted = rate // common, wanted // common
    if rate == wanted:
        return wave
    radius = math.ceil(_LOBES * rate / (min(rate, wanted) * _ROLLOFF))  # samples on either side that contribute to one
    if wanted * (rate + 2 * radius) > _LARGEST_TABLE:
        raise DecodeError(
            f"cannot resample {rate * common} Hz to {wanted * common} Hz: they have no small common multiple. Convert "
            f"the audio to {wanted * common} Hz"
        )
    if len(wave) <= _PIECE:
        return resample(wave, rate, wanted)
    # In overlapping pieces, since torchaudio takes several times the audio's memory. They start at multiples of `rate`,
    # where both rates have a sample.
    out = torch.empty(-(-len(wave) * wanted // rate))
    seconds_at_once, around = max(_PIECE // rate, 1), -(-radius // rate) + 1
    for first in range(0, -(-len(wave) // rate), seconds_at_once):
        before = min(first, around)
        piece = resample(wave[(first - before) * rate : (first + seconds_at_once + around) * rate], rate, wanted)
        piece = piece[before * wanted : (before + seconds_at_once) * wanted]
        out[first * wanted : first * wanted + len(piece)] = piece
    return out
