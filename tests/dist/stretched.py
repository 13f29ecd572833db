"""The digits demo with images of many sizes."""

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image


def stretch_images(digits: Path, folder: Path) -> Path:
    """A copy of the demo's training shards in `folder` with every image stretched to another size, from 20 to 130
    pixels a side."""
    rng = np.random.default_rng(0)
    (folder / "train").mkdir(parents=True)
    for path in sorted((digits / "train").glob("*.tar")):
        with tarfile.open(path) as source, tarfile.open(folder / "train" / path.name, "w", tarfile.USTAR_FORMAT) as to:
            for member in source:
                raw = source.extractfile(member).read()
                if not member.name.endswith(".json"):
                    raw = _stretched(raw, *rng.integers(20, 130, size=2).tolist())
                    member.size = len(raw)
                to.addfile(member, io.BytesIO(raw))
    return folder


def _stretched(raw: bytes, height: int, width: int) -> bytes:
    """The image in another size, as PNG whatever it was."""
    buffer = io.BytesIO()
    Image.open(io.BytesIO(raw)).resize((width, height)).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
