"""The held-out pictures and clips of a report, each with question, answer and truth. Imports no torch."""

import base64
import binascii
import json
from html import escape
from pathlib import Path

_SMALL_PIXELS = 128
"""Pictures up to this width are enlarged without blurring."""

_SIGNATURES = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}


def samples_section(path: Path) -> str:
    """A grid of the samples of `path` (samples.json), empty when there is none.

    A sample is {"images": [base64 of a PNG or JPEG, ...], "clips": [base64 of a WAV, ...], "question", "answer",
    "truth", "correct": bool}; a single picture may be given as "image".
    """
    if not path.exists():
        return ""
    try:
        samples = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(samples, list):
            raise ValueError("not a list")
    except ValueError as error:
        return f'<p class="note">samples.json cannot be read: {escape(str(error))}</p>'
    if not samples:
        return ""
    marked = [sample for sample in samples if sample.get("correct") is not None]
    right = sum(bool(sample["correct"]) for sample in marked)
    count = f'<p class="note">{right} of these {len(marked)} are right.</p>' if marked else ""
    return f'<ul class="samples">{"".join(map(_sample, samples))}</ul>{count}'


def _sample(sample: dict) -> str:
    correct = sample.get("correct")
    state = "" if correct is None else " right" if correct else " wrong"
    mark = {"": "", " right": '<span class="mark">✓ right</span>', " wrong": '<span class="mark">✗ wrong</span>'}[state]
    rows = "".join(
        f"<dt>{label}</dt><dd>{escape(str(sample[key]))}</dd>"
        for key, label in (("question", "Question"), ("answer", "Answer"), ("truth", "Truth"))
        if sample.get(key) is not None
    )
    media = _pictures(sample) + _clips(sample)
    return f'<li class="sample{state}">{media}<dl>{rows}</dl>{mark}</li>'


def _pictures(sample: dict) -> str:
    encoded = sample.get("images") or sample.get("image") or []
    encoded = [encoded] if isinstance(encoded, str) else encoded
    images = "".join(_picture(text, str(sample.get("question", ""))) for text in encoded)
    return f'<div class="pictures">{images}</div>' if images else ""


def _clips(sample: dict) -> str:
    clips = "".join(
        f'<audio controls preload="none" src="data:audio/wav;base64,{encoded}"></audio>'
        for encoded in sample.get("clips") or []
        if (_decoded(encoded) or b"").startswith(b"RIFF")
    )
    return f'<div class="clips">{clips}</div>' if clips else ""


def _decoded(encoded: str) -> bytes | None:
    """None for what is not base64."""
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return None


def _picture(encoded: str, question: str) -> str:
    """An img with its data inside; empty when `encoded` is no PNG and no JPEG."""
    content = _decoded(encoded) or b""
    kind = next((kind for signature, kind in _SIGNATURES.items() if content.startswith(signature)), None)
    if kind is None:
        return ""
    # A PNG has its width in bytes 16 to 20 (PNG specification, IHDR chunk).
    small = kind == "image/png" and int.from_bytes(content[16:20], "big") <= _SMALL_PIXELS
    alt = f"held-out picture to the question: {question}" if question else "held-out picture"
    css = ' class="small"' if small else ""
    return f'<img{css} src="data:{kind};base64,{encoded}" alt="{escape(alt)}" loading="lazy">'
