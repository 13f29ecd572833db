"""The held-out samples of a report: pictures and clips, each with question, answer and truth."""

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SMALL_PIXELS = 128
"""Pictures up to this width are enlarged without blurring."""

_SIGNATURES = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}
_WORDS = {"question": "Question", "answer": "Answer", "truth": "Truth"}


@dataclass(frozen=True)
class Picture:
    """A PNG or JPEG in base64."""

    kind: str
    encoded: str
    small: bool


@dataclass(frozen=True)
class Sample:
    """One sample; `clips` are WAV in base64, `words` (label, text), `correct` None where nobody has judged it."""

    pictures: list[Picture]
    clips: list[str]
    words: list[tuple[str, str]]
    correct: bool | None

    @property
    def question(self) -> str:
        """The question, empty where there is none."""
        return dict(self.words).get(_WORDS["question"], "")


@dataclass(frozen=True)
class ShownSamples:
    """The samples, or why they cannot be shown."""

    samples: list[Sample]
    fault: str = ""

    @property
    def judged(self) -> int:
        """Samples that were found right or wrong."""
        return sum(sample.correct is not None for sample in self.samples)

    @property
    def right(self) -> int:
        """Samples that were found right."""
        return sum(sample.correct is True for sample in self.samples)


def shown_samples(path: Path) -> ShownSamples | None:
    """The samples of `path` (samples.json), None when there are none.

    The file is a list of {"images": [base64 of a PNG or JPEG, ...], "clips": [base64 of a WAV, ...], "question",
    "answer", "truth", "correct": bool or null}. A medium that is none of these formats is left out.
    """
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, list) or not all(isinstance(sample, dict) for sample in found):
            raise ValueError("not a list of objects")
    except ValueError as error:
        return ShownSamples([], str(error))
    return ShownSamples([_sample(sample) for sample in found]) if found else None


def _sample(sample: dict[str, Any]) -> Sample:
    correct = sample.get("correct")
    return Sample(
        pictures=list(_pictures(sample.get("images") or [])),
        clips=[encoded for encoded in sample.get("clips") or [] if _decoded(encoded).startswith(b"RIFF")],
        words=[(label, str(sample[key])) for key, label in _WORDS.items() if sample.get(key) is not None],
        correct=None if correct is None else bool(correct),
    )


def _pictures(encoded_pictures: list[str]) -> Iterator[Picture]:
    for encoded in encoded_pictures:
        content = _decoded(encoded)
        kind = next((kind for signature, kind in _SIGNATURES.items() if content.startswith(signature)), None)
        if kind is not None:
            # A PNG has its width in bytes 16 to 20 (PNG specification, IHDR chunk).
            small = kind == "image/png" and int.from_bytes(content[16:20], "big") <= _SMALL_PIXELS
            yield Picture(kind, encoded, small)


def _decoded(encoded: str) -> bytes:
    """Empty for what is not base64."""
    try:
        return base64.b64decode(encoded, validate=True)
    except ValueError:
        return b""
