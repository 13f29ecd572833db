"""Samples of the demos: images of handwritten digits, tones, and short conversations about them.

The 1,797 scans in scikit-learn are split once, for all seeds, so no held-out image shows a training scan. In the mixed
demo, the last 8 of every 32 samples are text, so that without shuffling whole microbatches have no media.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from data.errors import DataError

CANVAS = 48  # pixels, height and width of every image
COLOURS = {
    "red": (235, 50, 50),
    "green": (50, 205, 70),
    "blue": (70, 110, 255),
    "yellow": (240, 220, 60),
    "pink": (240, 90, 215),
}
_NAMES = list(COLOURS)
CELL = 16  # pixels, height and width of a digit's cell
_SPLIT_SEED = 20_240_229
_HELD_OUT_SHARE = 0.2
_TWO_IMAGES = 0.02
# Shares of images with one, and with one or two digits; the rest has three. Training images have several questions
# and more digits, to teach which colour belongs to which digit.
_ONE_AND_TWO = {"held out": (0.75, 0.96), "training": (0.35, 0.75)}
PITCHES = {"low": 300.0, "middle": 700.0, "high": 1500.0}
"""Tones in Hz."""

PERIOD, TEXTS = 32, 8

_SIZES = ((48, 48), (32, 48), (48, 64), (32, 32))  # height, width in pixels
_RATES = (8000, 12000)  # samples per second
_MOST_TONES = 4
_TONE = _GAP = 0.12  # seconds
_ORDER = ("first", "second", "third")


@dataclass(frozen=True)
class Digits:
    """Scans of digits. `sources`: their numbers in scikit-learn's dataset."""

    scans: np.ndarray  # uint8 [N, 10, 10], 0 to 255: 8 x 8 with a blank frame, so that ink fades out at the edge
    labels: np.ndarray  # int [N]
    sources: np.ndarray  # int [N]


@dataclass(frozen=True)
class DemoSample:
    """A sample: turns (role, text with markers), members (extension, file), the numbers of its scans, and in
    preferences a wrong last answer."""

    turns: list[tuple[str, str]]
    members: list[tuple[str, bytes]]
    sources: list[int]
    rejected: str = ""


def load_scans(held_out: bool) -> Digits:
    """Return the training scans, or the held-out fifth. Raises DataError if scikit-learn is not installed."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("the digits demo takes its scans from scikit-learn: pip install mimo-train[demo]") from error
    bundle = load_digits()
    shuffled = np.random.default_rng(_SPLIT_SEED).permutation(len(bundle.target))
    cut = round(len(shuffled) * (1 - _HELD_OUT_SHARE))
    chosen = np.sort(shuffled[cut:] if held_out else shuffled[:cut])
    scans = np.pad(bundle.images[chosen] * (255 / 16), ((0, 0), (1, 1), (1, 1))).astype(np.uint8)
    return Digits(scans, bundle.target[chosen].astype(int), chosen)


def make_sample(digits: Digits, rng: np.random.Generator, text_only_fraction: float, questions: int = 1) -> DemoSample:
    """Return a sample drawn from `rng`, with up to `questions` different questions about its image."""
    if rng.random() < text_only_fraction:
        return make_text_sample(rng)
    extension = "jpg" if rng.random() < 0.5 else "png"
    if rng.random() < _TWO_IMAGES:
        return _two_images(digits, rng, extension)
    shares = _ONE_AND_TWO["training" if questions > 1 else "held out"]
    count = 1 + int(np.searchsorted(shares, rng.random(), side="right"))
    chosen = rng.integers(0, len(digits.labels), size=count)
    colours = rng.permutation(len(_NAMES))[:count].tolist()
    values, names = [str(digits.labels[at]) for at in chosen], [_NAMES[at] for at in colours]
    asked = _ask(values, names, questions, rng)
    image = encode_image(_draw(digits, chosen, colours, rng), extension)
    turns = [turn for question, answer in asked for turn in (("user", question), ("assistant", answer))]
    turns[0] = ("user", "<image>\n" + turns[0][1])
    return DemoSample(turns, [(extension, image)], digits.sources[chosen].tolist())


def make_pair(digits: Digits, rng: np.random.Generator, text_only_fraction: float) -> DemoSample:
    """Return a sample of `make_sample` with one question, and a wrong answer to it: another digit, colour or number in
    the place of one."""
    sample = make_sample(digits, rng, text_only_fraction)
    words = sample.turns[-1][1].split()
    at = int(rng.integers(len(words)))
    others = [word for word in (_NAMES if words[at] in COLOURS else map(str, range(10))) if word != words[at]]
    words[at] = others[int(rng.integers(len(others)))]
    return replace(sample, rejected=" ".join(words))


def make_text_sample(rng: np.random.Generator) -> DemoSample:
    """Return a question without an image."""
    number = int(rng.integers(0, 9))
    return DemoSample([("user", f"What comes after {number}?"), ("assistant", str(number + 1))], [], [])


def _ask(values: list[str], colours: list[str], count: int, rng: np.random.Generator) -> list[tuple[str, str]]:
    """Return up to `count` questions about an image, with answers, in random order. They are of one kind, so that no
    question's text answers another: "which digit is green" reveals a colour."""
    pairs = list(zip(values, colours, strict=True))
    once = [pair for pair in pairs if values.count(pair[0]) == 1]
    draw = rng.random()
    if draw < 0.05:
        asked = [("How many digits are there?", str(len(values)))]
    elif draw < 0.2:
        asked = [("Read the digits from left to right.", " ".join(values))]
    elif draw < 0.45 and once:
        asked = [(f"What colour is the {value}?", colour) for value, colour in once]
    else:
        asked = [(f"Which digit is {colour}?", value) for value, colour in pairs]
    return [asked[at] for at in rng.permutation(len(asked))[:count].tolist()]


def _two_images(digits: Digits, rng: np.random.Generator, extension: str) -> DemoSample:
    chosen = rng.integers(0, len(digits.labels), size=2)
    colours = rng.permutation(len(_NAMES))[:2].tolist()
    members = [
        (f"{at}.{extension}", encode_image(_draw(digits, chosen[at : at + 1], colours[at : at + 1], rng), extension))
        for at in range(len(chosen))
    ]
    asked = int(rng.integers(0, 2))
    question = f"<image>\n<image>\nWhich digit is in the {('first', 'second')[asked]} picture?"
    turns = [("user", question), ("assistant", str(digits.labels[chosen[asked]]))]
    return DemoSample(turns, members, digits.sources[chosen].tolist())


def _draw(digits: Digits, chosen: np.ndarray, colours: list[int], rng: np.random.Generator) -> np.ndarray:
    """Return uint8 [CANVAS, CANVAS, 3]: digits from left to right in their own columns, at any height."""
    canvas = np.full((CANVAS, CANVAS, 3), rng.integers(0, 24), dtype=np.uint8)
    columns = np.sort(rng.permutation(CANVAS // CELL)[: len(chosen)]) * CELL
    rows = rng.integers(0, CANVAS // CELL, size=len(chosen)) * CELL
    for top, left, at, colour in zip(rows.tolist(), columns.tolist(), chosen.tolist(), colours, strict=True):
        _paint(canvas[top : top + CELL, left : left + CELL], digits.scans[at], colour, rng)
    return canvas


def draw_digit(scan: np.ndarray, colour: int, size: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Return uint8 [height, width, 3]: a digit in the `colour`-th of `COLOURS` anywhere on dark background."""
    canvas = np.full((*size, 3), rng.integers(0, 24), dtype=np.uint8)
    top, left = (int(rng.integers(0, side - CELL + 1)) for side in size)
    _paint(canvas[top : top + CELL, left : left + CELL], scan, colour, rng)
    return canvas


def _paint(box: np.ndarray, scan: np.ndarray, colour: int, rng: np.random.Generator) -> None:
    """Draw a coloured scan on a cell [CELL, CELL, 3] of a canvas."""
    blend(box, render(scan, rng), colour)


def blend(box: np.ndarray, ink: np.ndarray, colour: int) -> None:
    """Draw ink, uint8 [CELL, CELL], in the `colour`-th of `COLOURS` on a cell [CELL, CELL, 3] of a canvas."""
    tint = np.asarray(COLOURS[_NAMES[colour]], dtype=np.float32)
    shade = ink[..., None].astype(np.float32) / 255
    box[:] = (box * (1 - shade) + tint * shade).astype(np.uint8)


def render(scan: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a scan as ink, uint8 [CELL, CELL]: enlarged smoothly, with a mild random scale, rotation and shift."""
    across, down = CELL / 8 * rng.uniform(0.85, 1.05, size=2)  # pixels per pixel of the scan
    angle = math.radians(rng.uniform(-6, 6))
    shift_x, shift_y = rng.uniform(-1, 1, size=2)
    cos, sin = math.cos(angle), math.sin(angle)
    # Pillow maps output to input pixels: shift to the centre, rotate back, scale down.
    middle_x, middle_y = CELL / 2 + shift_x, CELL / 2 + shift_y
    a, b = cos / across, sin / across
    d, e = -sin / down, cos / down
    coefficients = (a, b, 5 - a * middle_x - b * middle_y, d, e, 5 - d * middle_x - e * middle_y)
    image = Image.fromarray(scan).transform(
        (CELL, CELL), Image.Transform.AFFINE, coefficients, Image.Resampling.BICUBIC
    )
    return np.asarray(image)


def encode_image(pixels: np.ndarray, extension: str) -> bytes:
    """Return uint8 [height, width, 3] as a jpg or png file."""
    buffer = io.BytesIO()
    if extension == "jpg":
        Image.fromarray(pixels).save(buffer, "JPEG", quality=95, subsampling=0)
    else:
        Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def make_mixed_sample(digits: Digits, number: int, rng: np.random.Generator) -> DemoSample:
    """Return sample `number` of the mixed demo, drawn from `rng`."""
    if number % PERIOD >= PERIOD - TEXTS:
        return make_text_sample(rng)
    draw = rng.random()
    if draw < 0.45:
        return _images_sample(digits, rng, 1 + int(np.searchsorted((0.7, 0.9), rng.random(), side="right")))
    if draw < 0.8:
        return _clips_sample(rng, 1 + int(rng.random() < 0.2))
    return _image_and_clip(digits, rng)


def _images_sample(digits: Digits, rng: np.random.Generator, count: int) -> DemoSample:
    drawn = [_image(digits, rng) for _ in range(count)]
    members = _named([raw for raw, *_ in drawn], "png")
    at = int(rng.integers(0, count))
    question, answer = _about_image(drawn[at], rng, "" if count == 1 else f" of the {_ORDER[at]} picture")
    return _sample("<image>\n" * count, question, answer, members, [source for *_, source in drawn])


def _clips_sample(rng: np.random.Generator, count: int) -> DemoSample:
    extension = "flac" if rng.random() < 0.5 else "wav"
    played = [_clip(rng, extension) for _ in range(count)]
    members = _named([raw for raw, *_ in played], extension)
    at = int(rng.integers(0, count))
    question, answer = _about_clip(played[at], rng, "" if count == 1 else f" of the {_ORDER[at]} clip")
    return _sample("<audio>\n" * count, question, answer, members, [])


def _image_and_clip(digits: Digits, rng: np.random.Generator) -> DemoSample:
    drawn, played = _image(digits, rng), _clip(rng, "wav")
    question, answer = _about_image(drawn, rng) if rng.random() < 0.5 else _about_clip(played, rng)
    members = [("png", drawn[0]), ("wav", played[0])]
    return _sample("<image>\n<audio>\n", question, answer, members, [drawn[-1]])


def _sample(
    markers: str, question: str, answer: str, members: list[tuple[str, bytes]], sources: list[int]
) -> DemoSample:
    return DemoSample([("user", markers + question), ("assistant", answer)], members, sources)


def _named(files: list[bytes], extension: str) -> list[tuple[str, bytes]]:
    names = [extension] if len(files) == 1 else [f"{at}.{extension}" for at in range(len(files))]
    return list(zip(names, files, strict=True))


def _image(digits: Digits, rng: np.random.Generator) -> tuple[bytes, str, str, int]:
    """Return (file, colour, digit, scan) of one digit in an image of a random size."""
    at, colour = int(rng.integers(0, len(digits.labels))), int(rng.integers(0, len(COLOURS)))
    pixels = draw_digit(digits.scans[at], colour, _SIZES[rng.integers(0, len(_SIZES))], rng)
    return encode_image(pixels, "png"), list(COLOURS)[colour], str(digits.labels[at]), int(digits.sources[at])


def _about_image(drawn: tuple, rng: np.random.Generator, which: str = "") -> tuple[str, str]:
    _, colour, digit, _ = drawn
    return (f"Colour{which}?", colour) if rng.random() < 0.7 else (f"Digit{which}?", digit)


def _clip(rng: np.random.Generator, extension: str) -> tuple[bytes, str, str]:
    """Return (file, pitch, number of tones): tones of one pitch between random silences."""
    rate, count = int(rng.choice(_RATES)), int(rng.integers(1, _MOST_TONES + 1))
    pitch = list(PITCHES)[rng.integers(0, len(PITCHES))]
    before, after = rng.uniform(0, 0.3), rng.uniform(0, 0.6)
    time = np.arange(round((before + count * (_TONE + _GAP) + after) * rate)) / rate
    beat = (time - before) % (_TONE + _GAP)
    sounding = (beat < _TONE) & (time >= before) & (time < before + count * (_TONE + _GAP))
    # Tones fade in and out to avoid clicks.
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
