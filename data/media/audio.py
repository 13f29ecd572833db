"""Decode audio files to tensors at any sampling rate.

torchaudio resamples. It stores a filter for every phase of the two rates, 6.7 GB for 44,101 -> 16,000 Hz, so such rates
are rejected.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain

import numpy as np
import torch

from data.errors import DecodeError, reason_of
from data.media.audio_files import decoded_blocks, mono_blocks
from data.media.headers import read_video_header, reader_of
from data.media.options import BOUNDS, Bounds

_LOBES, _ROLLOFF = 6, 0.99  # torchaudio's `lowpass_filter_width` and `rolloff`
_LARGEST_TABLE = 1 << 24  # numbers in the filters of all phases
_PIECE = 1 << 20  # samples that are resampled at once


def decode_audio(raw: bytes, rate: int, samples: int | None = None, bounds: Bounds = BOUNDS) -> torch.Tensor:
    """Return an audio file as float32 [samples], mono (the mean of its channels), at `rate` samples per second.

    Integers of any width are divided by their largest magnitude, so FLAC and WAV of one recording give equal numbers in
    [-1, 1). Floats stay as they are, even above 1. Memory is needed for twice the result and some seconds of the file.

    Args:
        samples: length to cut or zero-pad to; None keeps that of the file.

    Raises:
        DecodeError: it is damaged, or above its bounds.
        MemoryShortage, MissingLibrary: this machine cannot decode it.
    """
    return _cut_or_pad(_decode(raw, mono_blocks(raw, bounds), rate, bounds), samples)


def decode_sound(raw: bytes, rate: int, samples: int | None = None, bounds: Bounds = BOUNDS) -> torch.Tensor:
    """Return the first sound track of a video as `decode_audio` returns a file, from the first sample of the track.

    Raises:
        DecodeError: it has no sound track, is damaged, above its bounds, or differs from `samples` by more than half a
            second.
        MemoryShortage, MissingLibrary: this machine cannot decode it.
    """
    container = read_video_header(reader_of(raw), len(raw)).container
    wave = _decode(raw, decoded_blocks(raw, container), rate, bounds)
    if samples is not None and abs(len(wave) - samples) > rate / 2:
        raise DecodeError(
            f"its header says that it has {samples / rate:.2f} s of sound, and it has {len(wave) / rate:.2f} s"
        )
    return _cut_or_pad(wave, samples)


def _cut_or_pad(wave: torch.Tensor, samples: int | None) -> torch.Tensor:
    if samples is None:
        return wave
    return torch.nn.functional.pad(wave[:samples], (0, max(samples - len(wave), 0)))


def _decode(raw: bytes, blocks: Iterator[tuple[np.ndarray, int]], rate: int, bounds: Bounds) -> torch.Tensor:
    import soundfile

    try:
        checked = _checked(raw, blocks, bounds)
        first, file_rate = next(checked)
        waves = map(torch.from_numpy, chain([first], (block for block, _ in checked)))
        return torch.cat([*resample_blocks(waves, file_rate, rate)])
    except DecodeError:
        raise
    except soundfile.LibsndfileError as error:  # its text would name the opened object
        raise DecodeError(f"cannot decode {len(raw)} bytes of audio: {error.error_string}") from error
    except Exception as error:  # RuntimeError and others mean the same
        raise DecodeError(f"cannot decode {len(raw)} bytes of audio: {reason_of(error)}") from error


def _checked(raw: bytes, blocks: Iterator[tuple[np.ndarray, int]], bounds: Bounds) -> Iterator[tuple[np.ndarray, int]]:
    """Yield (float32 [samples], samples per second) of blocks. Raises DecodeError if there are none, or if they have
    several rates, are above their bounds, or not finite."""
    frames, rate = 0, 0
    for block, block_rate in blocks:
        frames += len(block)
        if block_rate != (rate or block_rate):
            raise DecodeError(f"its parts have different rates ({rate} and {block_rate} Hz)")
        if excess := bounds.excess("seconds", frames / block_rate):
            raise DecodeError(excess)
        if not np.isfinite(block).all():
            raise DecodeError(f"{len(raw)} bytes of audio hold samples that are not finite")
        rate = block_rate
        yield block, rate
    if not frames:
        raise DecodeError(f"no audio in {len(raw)} bytes")


def resample_blocks(blocks: Iterator[torch.Tensor], rate: int, wanted: int) -> Iterator[torch.Tensor]:
    """Resample float32 [samples], in blocks, from `rate` to `wanted` Hz: to `ceil(samples * wanted / rate)` samples.

    In overlapping pieces, since torchaudio takes several times the audio's memory. They start at multiples of `rate`
    (over the common divisor), where both rates have a sample.

    Raises DecodeError if their filters would take too much memory.
    """
    from torchaudio.functional import resample

    common = math.gcd(rate, wanted)
    rate, wanted = rate // common, wanted // common
    if rate == wanted:
        yield from blocks
        return
    radius = math.ceil(_LOBES * rate / (min(rate, wanted) * _ROLLOFF))  # samples on either side that contribute to one
    if wanted * (rate + 2 * radius) > _LARGEST_TABLE:
        raise DecodeError(
            f"cannot resample {rate * common} Hz to {wanted * common} Hz: they have no small common multiple. Convert "
            f"the audio to {wanted * common} Hz"
        )
    at_once, around = max(_PIECE // rate, 1) * rate, (-(-radius // rate) + 1) * rate
    held, length, before = list[torch.Tensor](), 0, 0  # `before`: samples held that are resampled already
    for block in blocks:
        held.append(block)
        length += len(block)
        if length <= before + at_once + around:
            continue
        wave = torch.cat(held)
        while length > before + at_once + around:
            end = before + at_once
            yield resample(wave[: end + around], rate, wanted)[before * wanted // rate : end * wanted // rate]
            before = min(end, around)
            wave = wave[end - before :]
            length = len(wave)
        held = [wave]
    if length > before:
        yield resample(torch.cat(held), rate, wanted)[before * wanted // rate :]
