"""What the mixed demo shows, plays and asks: pictures of handwritten digits in several sizes, tones of several lengths.

Of every 32 samples in a row the last 8 are text alone, so that without shuffling whole microbatches have no media. The
others have one to three pictures, one or two clips, or a picture and a clip, and one question about one of them.
"""

from __future__ import annotations

import io

import numpy as np

from data.demo.digits import COLOURS, DemoSample, Digits, draw_digit, encode_picture, make_text_sample

PITCHES = {"low": 300.0, "middle": 700.0, "high": 1500.0}
"""Tones in Hz."""

PERIOD, TEXTS = 32, 8

_SIZES = ((48, 48), (32, 48), (48, 64), (32, 32))  # height, width in pixels
_RATES = (8000, 12000)  # samples a second
_MOST_TONES = 4
_TONE = _GAP = 0.12  # seconds
_ORDER = ("first", "second", "third")


def make_mixed_sample(digits: Digits, number: int, rng: np.random.Generator) -> DemoSample:
    """Sample `number` of a part, drawn from `rng`."""
    if number % PERIOD >= PERIOD - TEXTS:
        return make_text_sample(rng)
    draw = rng.random()
    if draw < 0.45:
        return _pictures_sample(digits, rng, 1 + int(np.searchsorted((0.7, 0.9), rng.random(), side="right")))
    if draw < 0.8:
        return _clips_sample(rng, 1 + int(rng.random() < 0.2))
    return _picture_and_clip(digits, rng)


def _pictures_sample(digits: Digits, rng: np.random.Generator, count: int) -> DemoSample:
    drawn = [_picture(digits, rng) for _ in range(count)]
    members = _named([raw for raw, *_ in drawn], "png")
    at = int(rng.integers(0, count))
    question, answer = _about_picture(drawn[at], rng, "" if count == 1 else f" of the {_ORDER[at]} picture")
    return _sample("<image>\n" * count, question, answer, members, [source for *_, source in drawn])


def _clips_sample(rng: np.random.Generator, count: int) -> DemoSample:
    extension = "flac" if rng.random() < 0.5 else "wav"
    played = [_clip(rng, extension) for _ in range(count)]
    members = _named([raw for raw, *_ in played], extension)
    at = int(rng.integers(0, count))
    question, answer = _about_clip(played[at], rng, "" if count == 1 else f" of the {_ORDER[at]} clip")
    return _sample("<audio>\n" * count, question, answer, members, [])


def _picture_and_clip(digits: Digits, rng: np.random.Generator) -> DemoSample:
    drawn, played = _picture(digits, rng), _clip(rng, "wav")
    question, answer = _about_picture(drawn, rng) if rng.random() < 0.5 else _about_clip(played, rng)
    members = [("png", drawn[0]), ("wav", played[0])]
    return _sample("<image>\n<audio>\n", question, answer, members, [drawn[-1]])


def _sample(
    markers: str, question: str, answer: str, members: list[tuple[str, bytes]], sources: list[int]
) -> DemoSample:
    return DemoSample([("user", markers + question), ("assistant", answer)], members, sources)


def _named(files: list[bytes], extension: str) -> list[tuple[str, bytes]]:
    names = [extension] if len(files) == 1 else [f"{at}.{extension}" for at in range(len(files))]
    return list(zip(names, files, strict=True))


def _picture(digits: Digits, rng: np.random.Generator) -> tuple[bytes, str, str, int]:
    """(file, colour, digit, scan) of one digit somewhere in a picture of any of the sizes."""
    at, colour = int(rng.integers(0, len(digits.labels))), int(rng.integers(0, len(COLOURS)))
    pixels = draw_digit(digits.scans[at], colour, _SIZES[rng.integers(0, len(_SIZES))], rng)
    return encode_picture(pixels, "png"), list(COLOURS)[colour], str(digits.labels[at]), int(digits.sources[at])


def _about_picture(drawn: tuple, rng: np.random.Generator, which: str = "") -> tuple[str, str]:
    _, colour, digit, _ = drawn
    return (f"Colour{which}?", colour) if rng.random() < 0.7 else (f"Digit{which}?", digit)


def _clip(rng: np.random.Generator, extension: str) -> tuple[bytes, str, str]:
    """(file, pitch, number of tones) of some tones of one pitch, with silence of any length around them."""
    rate, count = int(rng.choice(_RATES)), int(rng.integers(1, _MOST_TONES + 1))
    pitch = list(PITCHES)[rng.integers(0, len(PITCHES))]
    before, after = rng.uniform(0, 0.3), rng.uniform(0, 0.6)
    time = np.arange(round((before + count * (_TONE + _GAP) + after) * rate)) / rate
    beat = (time - before) % (_TONE + _GAP)
    sounding = (beat < _TONE) & (time >= before) & (time < before + count * (_TONE + _GAP))
    # A tone swells and fades, so that its edges do not click.
    envelope = np.where(sounding, np.sin(np.pi * beat / _TONE), 0.0)
    wave = rng.uniform(0.3, 0.9) * envelope * np.sin(2 * np.pi * PITCHES[pitch] * rng.uniform(0.95, 1.05) * time)
    wave += rng.normal(scale=0.003, size=len(time))
    return _encode_clip(wave, rate, extension), pitch, str(count)


def _about_clip(played: tuple, rng: np.random.Generator, which: str = "") -> tuple[str, str]:
    _, pitch, count = played
    return (f"Pitch{which}?", pitch) if rng.random() < 0.6 else (f"How many tones{which}?", count)


def _encode_clip(wave: np.ndarray, rate: int, extension: str) -> bytes:
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, np.round(wave * 32767).astype(np.int16), rate, format=extension.upper(), subtype="PCM_16")
    return buffer.getvalue()
