"""torchvision's decoder, and its resize of pictures of 8 bits, without the import of torchvision.

That import brings models and datasets with it, which no run uses. The decoder is a library of torchvision 0.26 with
operators of torch; the resize is torch's own, called as `torchvision.transforms.v2.functional.resize` calls it.
Importing this raises ImportError where the library is missing, or made for another torch.
"""

from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, FileFinder
from importlib.util import find_spec

import torch

_RGB = 3
"""`torchvision.io.ImageReadMode.RGB`."""


def decode_image(raw: torch.Tensor) -> torch.Tensor:
    """A file of JPEG, PNG, GIF or WebP, uint8 [bytes] -> uint8 [3, H, W], of 16 bits uint16, as its pixels stand.

    Raises:
        RuntimeError: damaged.
    """
    return torch.ops.image.decode_image(raw, _RGB, False)


def resize(picture: torch.Tensor, height: int, width: int, interpolation: str, rounded: bool = True) -> torch.Tensor:
    """A picture, uint8 or float32 [3, H, W] -> uint8 [3, height, width], with antialiasing.

    Args:
        interpolation: `bilinear` or `bicubic`.
        rounded: False: float32 instead, from 0 to 255.
    """
    batch = picture[None]
    if batch.is_contiguous(memory_format=torch.channels_last):
        # With the stride of a batch that torch expects: otherwise it gives the result another layout.
        batch = batch.as_strided(batch.shape, (batch.numel(), *batch.stride()[1:]))
    if not rounded:
        batch, size = batch.float(), [height, width]
        return torch.nn.functional.interpolate(batch, size, mode=interpolation, align_corners=False, antialias=True)[0]
    in_bytes = interpolation == "bicubic" or torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    found = torch.nn.functional.interpolate(
        batch if in_bytes else batch.float(), [height, width], mode=interpolation, align_corners=False, antialias=True
    )
    return (found if in_bytes else found.round_().to(torch.uint8))[0]


def _load_library() -> None:
    package = find_spec("torchvision")
    for folder in (package and package.submodule_search_locations) or ():
        found = FileFinder(folder, (ExtensionFileLoader, EXTENSION_SUFFIXES)).find_spec("image")
        if found is not None and found.origin:
            try:
                torch.ops.load_library(found.origin)
            except OSError as error:
                raise ImportError(f"{found.origin}, which decodes pictures, cannot be loaded: {error}") from error
            return
    raise ImportError("torchvision, which decodes pictures, is not installed, or without its library `image`")


_load_library()
