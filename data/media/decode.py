"""Decode images (uint8 [3, H, W]), videos and audio (float32 [samples]) to tensors.

torchvision decodes JPEG, three times as fast as Pillow, which decodes the rest. Only torchvision's operator library is
loaded: importing it would import its models and datasets.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, FileFinder
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from PIL import Image

from data.errors import DecodeError, reason_of
from data.media.headers import import_heif, parse_header_bytes
from data.media.options import BOUNDS, WHITE, Bounds, Colour, Resize

_RGB = 3
"""`torchvision.io.ImageReadMode.RGB`."""


def decode_image_file(raw: bytes, bounds: Bounds = BOUNDS, background: Colour | None = WHITE) -> torch.Tensor:
    """Return an image file (its first frame or page) as uint8 [3, H, W], RGB, upright.

    Args:
        background: colour behind transparent pixels; None ignores transparency, as `convert("RGB")` does.

    Raises:
        DecodeError: it is damaged, or above its bounds.
        MemoryShortage, MissingLibrary: this machine cannot decode it.
    """
    header = parse_header_bytes(raw)
    if header is None:
        raise DecodeError(f"no header of an image that can be decoded in {len(raw)} bytes")
    if excess := bounds.excess_of_extent("image", header.height, header.width):
        raise DecodeError(excess)
    try:
        if header.format == "JPEG":
            # torch requires writable memory
            image = decode_with_torchvision(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        elif header.format == "HEIC":
            image = _flat(import_heif().open_heif(io.BytesIO(raw)).to_pillow(), background)
        else:
            image = _decode_with_pillow(raw, background)
    except Exception as error:  # torchvision and Pillow raise many types for damaged bytes
        raise DecodeError(f"cannot decode {len(raw)} bytes of {header.format}: {reason_of(error)}") from error
    image = _upright(image, header.orientation)
    if tuple(image.shape) != (3, header.height, header.width):
        raise DecodeError(f"decoded to {tuple(image.shape)}, but its header says {(3, header.height, header.width)}")
    return image


def fitted(
    image: torch.Tensor,
    size: tuple[int, int],
    resize: Resize,
    canvas: tuple[int, int] | None = None,
    bounds: Bounds = BOUNDS,
) -> torch.Tensor:
    """Return an image [3, H, W] as an encoder takes it: uint8, or float32 if `resize.rounded` is False.

    Without a `canvas` it is [3, *size]: stretched, or cropped at the centre. With one (`Media.canvas`) it is in tiles,
    [tiles, 3, side, side]. The first tile is the whole image, stretched. The others cut a black canvas row by row; the
    image is resized to fit into its centre. An empty canvas gives one tile: the image padded to a square with
    `resize.background`. Raises DecodeError if it is above its bounds on the way.
    """
    height, width = image.shape[1:]
    largest = resize.largest(height, width, cut=canvas is None or min(canvas) > 0)
    if excess := bounds.excess_of_extent("image", *largest):
        raise DecodeError(excess)
    if canvas is not None:
        return _in_tiles(image, canvas, largest, resize)
    target = list(largest) if resize.shortest_edge else [*size]
    image = _resized(image, target, resize)
    top, left = (target[0] - size[0]) // 2, (target[1] - size[1]) // 2
    return image[:, top : top + size[0], left : left + size[1]].contiguous()


def _in_tiles(image: torch.Tensor, canvas: tuple[int, int], square: tuple[int, int], resize: Resize) -> torch.Tensor:
    height, width = image.shape[1:]
    side = resize.tile
    if not min(canvas):
        return _resized(_centred(image, square, resize.background), [side] * 2, resize)[None]
    down, across = canvas[0] / height, canvas[1] / width
    if across < down:
        target = [min(math.ceil(height * across), canvas[0]), canvas[1]]
    else:
        target = [canvas[0], min(math.ceil(width * down), canvas[1])]
    centred = _centred(_resized(image, target, resize), canvas, (0, 0, 0))
    tiles = centred.unfold(1, side, side).unfold(2, side, side)  # 3, rows, columns, side, side
    return torch.cat([_resized(image, [side] * 2, resize)[None], tiles.permute(1, 2, 0, 3, 4).flatten(0, 1)])


def _resized(image: torch.Tensor, size: list[int], resize: Resize) -> torch.Tensor:
    """Stretch an image [3, H, W] to `size`, (height, width)."""
    if list(image.shape[1:]) == size:
        return image if resize.rounded else image.float()
    return resize_image(image, size[0], size[1], resize.interpolation, resize.rounded)


def _centred(image: torch.Tensor, size: Sequence[int], colour: tuple[int, int, int]) -> torch.Tensor:
    """Centre an image [3, H, W] on a canvas of `size`; an odd border is larger at the right or bottom."""
    top, left = ((outer - inner) // 2 for outer, inner in zip(size, image.shape[1:], strict=True))
    canvas = torch.tensor(colour, dtype=image.dtype)[:, None, None].repeat(1, *size)
    canvas[:, top : top + image.shape[1], left : left + image.shape[2]] = image
    return canvas


def _decode_with_pillow(raw: bytes, background: Colour | None) -> torch.Tensor:
    with Image.open(io.BytesIO(raw)) as image:
        if image.mode in ("I", "F"):
            raise DecodeError(f"pixels of the type {image.mode!r} have no known range: write them with 8 or 16 bits")
        if image.mode.startswith("I;16"):
            # Pillow's conversion to RGB would clip values above 255.
            grey = np.array(image).astype(np.int64)
            shades = ((grey + 128) // 257).astype(np.uint8)
            return torch.from_numpy(shades).expand(3, -1, -1)
        return _flat(image, background)


def _flat(image: Any, background: Colour | None) -> torch.Tensor:
    if background is not None and image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, (*background, 255)), layer)
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def _upright(image: torch.Tensor, orientation: int) -> torch.Tensor:
    """Undo the EXIF orientation of [3, H, W]: values above 4 swap height and width, then one or two mirrors."""
    if orientation >= 5:
        image = image.transpose(1, 2)
    mirrors = {2: [2], 3: [1, 2], 4: [1], 6: [2], 7: [1, 2], 8: [1]}.get(orientation)
    return image.flip(mirrors) if mirrors else image


def decode_with_torchvision(raw: torch.Tensor) -> torch.Tensor:
    """Decode a JPEG file, uint8 [bytes], to uint8 [3, H, W], not upright.

    Raises RuntimeError for damaged bytes.
    """
    return torch.ops.image.decode_image(raw, _RGB, False)


def resize_image(
    image: torch.Tensor, height: int, width: int, interpolation: str, rounded: bool = True
) -> torch.Tensor:
    """Resize an image, uint8 or float32 [3, H, W], to uint8 [3, height, width], with antialiasing.

    Args:
        interpolation: `bilinear` or `bicubic`.
        rounded: if False, return float32 from 0 to 255.
    """
    batch = image[None]
    if batch.is_contiguous(memory_format=torch.channels_last):
        # With the batch stride that torch expects; otherwise it changes the result's layout.
        batch = batch.as_strided(batch.shape, (batch.numel(), *batch.stride()[1:]))
    if not rounded:
        batch, size = batch.float(), [height, width]
        return torch.nn.functional.interpolate(batch, size, mode=interpolation, align_corners=False, antialias=True)[0]
    in_bytes = interpolation == "bicubic" or torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    resized = torch.nn.functional.interpolate(
        batch if in_bytes else batch.float(), [height, width], mode=interpolation, align_corners=False, antialias=True
    )
    return (resized if in_bytes else resized.round_().to(torch.uint8))[0]


def _load_library() -> None:
    package = find_spec("torchvision")
    for folder in (package and package.submodule_search_locations) or ():
        library = FileFinder(folder, (ExtensionFileLoader, EXTENSION_SUFFIXES)).find_spec("image")
        if library is not None and library.origin:
            try:
                torch.ops.load_library(library.origin)
            except OSError as error:
                raise ImportError(f"{library.origin}, which decodes images, cannot be loaded: {error}") from error
            return
    raise ImportError("torchvision, which decodes images, is not installed, or without its library `image`")


_load_library()
