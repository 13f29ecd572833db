"""Pictures and clips of held-out samples, as the report shows and plays them."""

import base64
import io
import wave

import torch

from data.pipeline import Samples

SHOWN_SECONDS = 10
"""Clips are cut to this for the report."""


def shown_media(dataset: Samples, number: int) -> dict[str, list[str]]:
    """Base64 of PNG (`images`) and WAV (`clips`) files of a sample, each medium once, as the first module of its kind
    gets it."""
    shown: dict[str, list[str]] = {"images": [], "clips": []}
    first = {item.kind: item.module for item in reversed(dataset.modules)}
    if module := first.get("image"):
        shown["images"] = [_png(picture) for picture in dataset.media(number, module)]
    if module := first.get("audio"):
        sizes = dataset.input_sizes(number, module)
        clips = dataset.media(number, module)
        shown["clips"] = [_wav(clip, rate) for clip, (_, rate) in zip(clips, sizes, strict=True)]
    return shown


def _png(picture: torch.Tensor) -> str:
    """uint8 [3, height, width] as base64 of a PNG file; of tiles, [tiles, 3, height, width], the first: all of it."""
    from PIL import Image

    buffer = io.BytesIO()
    picture = picture[0] if picture.ndim == 4 else picture
    Image.fromarray(picture.permute(1, 2, 0).numpy()).save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def _wav(clip: torch.Tensor, rate: int) -> str:
    """float32 [samples] in [-1, 1] as base64 of a WAV file of 16 bits."""
    samples = (clip[: SHOWN_SECONDS * rate].clamp(-1, 1) * 32767).round().to(torch.int16)
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.numpy().tobytes())
    return base64.b64encode(buffer.getvalue()).decode()
