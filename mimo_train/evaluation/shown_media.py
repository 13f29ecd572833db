"""Pictures and clips of held-out samples, as the report shows and plays them."""

import base64
import io
import wave
from collections.abc import Mapping, Sequence

import torch

from data.pipeline import Samples

SHOWN_SECONDS = 10
"""Clips are cut to this for the report."""


def shown_media(
    dataset: Samples,
    number: int,
    media: Mapping[str, Sequence[torch.Tensor]] | None = None,
    seconds: int | None = SHOWN_SECONDS,
) -> dict[str, list[str]]:
    """Base64 of PNG (`images`) and WAV (`clips`) files of a sample, each medium once, as the first module of its kind
    gets it.

    Args:
        media: inputs of each module, if they have been read; default: read them.
        seconds: length to cut clips to; None: keep them whole.
    """
    shown: dict[str, list[str]] = {"images": [], "clips": []}
    first = {item.kind: item.module for item in reversed(dataset.modules)}
    inputs = {module: media[module] if media else dataset.media(number, module) for module in first.values()}
    if module := first.get("image"):
        shown["images"] = [_png(picture) for picture in inputs[module]]
    if module := first.get("audio"):
        sizes = dataset.input_sizes(number, module)
        clips = zip(inputs[module], sizes, strict=True)
        shown["clips"] = [_wav(clip[: seconds * rate] if seconds else clip, rate) for clip, (_, rate) in clips]
    return shown


def _png(picture: torch.Tensor) -> str:
    """uint8 or float32 [3, height, width] as base64 of a PNG file; of tiles, [tiles, 3, height, width], the first."""
    from PIL import Image

    buffer = io.BytesIO()
    picture = picture[0] if picture.ndim == 4 else picture
    if picture.is_floating_point():
        picture = picture.round().clamp(0, 255).to(torch.uint8)
    Image.fromarray(picture.permute(1, 2, 0).numpy()).save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def _wav(clip: torch.Tensor, rate: int) -> str:
    """float32 [samples] in [-1, 1] as base64 of a WAV file of 16 bits."""
    samples = (clip.clamp(-1, 1) * 32767).round().to(torch.int16)
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.numpy().tobytes())
    return base64.b64encode(buffer.getvalue()).decode()
