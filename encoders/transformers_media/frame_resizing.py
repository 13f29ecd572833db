"""Video processors of `transformers` that get the frames of a video one at a time, where they resize all of them: all
frames of a long video at their original size take gigabytes."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from transformers.image_utils import SizeDict
from transformers.video_processing_utils import BaseVideoProcessor

from encoders.errors import EncoderError

type Decode = Callable[[Sequence[int]], Iterable[torch.Tensor]]
"""Frame numbers of a video, ascending -> these frames, each uint8 [3, height, width]."""
type Resize = Callable[[torch.Tensor], torch.Tensor]
"""Frames [..., 3, height, width] -> resized ones."""

METHODS = "resize", "aspect_ratio_preserving_resize"
"""Methods of video processors that resize frames."""


def resize_by_frame(processor: Any, frames: Iterable[torch.Tensor], shape: Sequence[int]) -> Any:
    """Return a processor that resizes `frames`, each uint8 [3, height, width], one at a time, in place of those that it
    is called with, on the meta device. It raises EncoderError if it resizes others than [frames, 3, height, width] of
    `shape`."""

    def resize_each(resize: Resize, videos: torch.Tensor) -> torch.Tensor:
        if [videos.shape[:-3].numel(), *videos.shape[-3:]] != [*shape]:
            name = type(processor.video_processor).__name__
            raise EncoderError(f"{name} resizes {[*videos.shape]}, not frames of {[*shape]}")
        return torch.cat([resize(frame[None].to(videos.dtype)) for frame in frames]).unflatten(0, videos.shape[:-3])

    return _with_resize(processor, resize_each)


def record_resizes(processor: Any) -> tuple[Any, list[Resize]]:
    """Return a copy of a processor, which is called on the meta device, and the list to which it adds each of its
    resizes."""
    calls: list[Resize] = []

    def noted(resize: Resize, videos: torch.Tensor) -> torch.Tensor:
        calls.append(resize)
        return resize(videos)

    return _with_resize(processor, noted), calls


def _with_resize(processor: Any, replacement: Callable[[Resize, torch.Tensor], torch.Tensor]) -> Any:
    """Return a processor with a `replacement` for `METHODS`, which gets how to resize, and what."""
    original = processor.video_processor
    processor, part = copy(processor), copy(original)
    processor.video_processor = part
    for method in (getattr(original, name) for name in METHODS if hasattr(original, name)):

        def replaced(*args: Any, method: Any = method, **options: Any) -> torch.Tensor:
            given = inspect.signature(method).bind(*args, **options).arguments
            videos, (height, width) = next(iter(given.values())), method(*args, **options).shape[-2:]
            how = {"size": SizeDict(height=height, width=width), "resample": given["resample"]}
            resize = partial(BaseVideoProcessor.resize, original, **how, antialias=given.get("antialias", True))
            return replacement(lambda frames: resize(frames.contiguous()), videos)

        setattr(part, method.__name__, replaced)
    return processor
