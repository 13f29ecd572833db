"""Pictures of any size, which differ within every microbatch: the numbers of one process at any layout."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.dist.runs import require_equal, run

VISION, LANGUAGE = "modules.images.layout", "modules.language.layout"

NATIVE = (
    "encoder@modules.images.encoder=vit_tiny_native",
    "modules.images.encoder.num_layers=3",
    "modules.images.projector.merge=2",
    "data.sequence_length=96",
)
"""Pictures of 1 to 9 tokens."""

LAYOUTS = {
    "any size: vision pp2 + language dp2": (f"{VISION}.pp=2", f"{LANGUAGE}.dp=2"),
    "any size: vision pp2 dp2 + language 1": (f"{VISION}.pp=2", f"{VISION}.dp=2"),
    "any size: vision tp2 sp dp2 by patches + language 1": (
        f"{VISION}.tp=2",
        f"{VISION}.sp=true",
        f"{VISION}.dp=2",
        "modules.images.balance=patches",
    ),
    "any size: vision dp2 + language tp2, same ranks": (
        "placement.mode=shared",
        f"{VISION}.dp=2",
        f"{LANGUAGE}.tp=2",
    ),
}


@pytest.fixture(scope="module")
def sizes(digits, tmp_path_factory) -> Path:
    """The digits demo with every picture stretched to another size, of which some are beyond the bounds."""
    folder = tmp_path_factory.mktemp("sizes")
    rng = np.random.default_rng(0)
    for path in sorted((digits / "train").glob("*.tar")):
        (folder / "train").mkdir(exist_ok=True)
        with tarfile.open(path) as source, tarfile.open(folder / "train" / path.name, "w", tarfile.USTAR_FORMAT) as to:
            for member in source:
                raw = source.extractfile(member).read()
                if not member.name.endswith(".json"):
                    raw = stretched(raw, *rng.integers(20, 130, size=2).tolist())
                    member.size = len(raw)
                to.addfile(member, io.BytesIO(raw))
    return folder


def stretched(raw: bytes, height: int, width: int) -> bytes:
    """The picture in another size, as PNG whatever it was."""
    buffer = io.BytesIO()
    Image.open(io.BytesIO(raw)).resize((width, height)).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def one_process(sizes, tmp_path_factory):
    """Curve of one process."""
    return run("vlm_digits", sizes, tmp_path_factory.mktemp("one"), *NATIVE, "layout=one_process")


@pytest.mark.parametrize("title", LAYOUTS)
def test_pictures_of_any_size_give_the_numbers_of_one_process(title, one_process, sizes, tmp_path):
    layout = ("layout=two_processes", *LAYOUTS[title])
    require_equal(one_process, run("vlm_digits", sizes, tmp_path, *NATIVE, *layout))
