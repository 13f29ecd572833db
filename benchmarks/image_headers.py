"""Processor time of indexing an image, with its header read (by Pillow) and without.

    python benchmarks/image_headers.py                                # all kinds of images
    python benchmarks/image_headers.py --images 3000 --blocks 30 --kind jpeg

For each kind a shard of images with their records is made in a temporary folder, and what is read of each image is
counted. Then the shard is indexed in turns with and without headers. Their order within a block is random, so that a
machine that becomes slower is slower for both.
"""

import argparse
import io
import random
import shutil
import statistics
import struct
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.index import indexing
from data.media import headers
from data.media.headers import ImageHeader, parse_header
from data.storage.files import ReadRange

Parser = Callable[[ReadRange, int], ImageHeader | None]

SIZES = ((480, 640), (427, 640), (640, 480), (768, 1024))  # height, width in pixels
DISTINCT = 24
"""Images that are made; a shard repeats them."""

ORIENTATION = 0x0112
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")


PARSERS: dict[str, Parser] = {"headers": parse_header, "none": lambda read, size: None}


def photo(seed: int) -> Image.Image:
    """An image that compresses as a photograph does: smooth, with noise."""
    rng = np.random.default_rng(seed)
    height, width = SIZES[seed % len(SIZES)]
    coarse = Image.fromarray(rng.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    return Image.fromarray((smooth + rng.integers(-6, 7, smooth.shape)).clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    """The image as a file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **({"quality": 85} if kind == "JPEG" else {"compress_level": 1}), **options)
    return buffer.getvalue()


def camera_exif(seed: int) -> bytes:
    """EXIF as of a camera: orientation, maker note of 20 kB, and a thumbnail."""
    exif = Image.Exif()
    exif[0x010F], exif[0x0110], exif[ORIENTATION] = "Maker", "Model", (1, 3, 6, 8)[seed % 4]
    exif.get_ifd(0x8769)[0x927C] = random.Random(seed).randbytes(20000)
    return exif.tobytes() + encoded(photo(seed).resize((160, 120)), "JPEG")


def segment(marker: int, body: bytes) -> bytes:
    """A segment of a JPEG file."""
    return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body


def behind_metadata(raw: bytes, seed: int) -> bytes:
    """The JPEG file with a profile in nine parts, XMP and a Photoshop block in front of its frame header, 0.6 MB."""
    noise = random.Random(seed).randbytes
    more = [segment(0xE2, b"ICC_PROFILE\0" + bytes([part, 9]) + noise(60000)) for part in range(1, 10)]
    more += [segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + b"<x/>" * 2000), segment(0xED, noise(20000))]
    at = 2
    while raw[at + 1] in (0xE0, 0xE1):
        at += 2 + int.from_bytes(raw[at + 2 : at + 4], "big")
    return raw[:at] + b"".join(more) + raw[at:]


def png_with_metadata(seed: int) -> bytes:
    """A PNG file with a profile of 3 kB, a long text and EXIF."""
    info = PngInfo()
    info.add_text("parameters", "word " * 4000, zip=True)
    profile = random.Random(seed).randbytes(3000)
    return encoded(photo(seed), "PNG", icc_profile=profile, pnginfo=info, exif=camera_exif(seed))


KINDS: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "jpeg": ("jpg", lambda seed: encoded(photo(seed), "JPEG")),
    "jpeg exif": ("jpg", lambda seed: encoded(photo(seed), "JPEG", exif=camera_exif(seed))),
    "jpeg metadata": (
        "jpg",
        lambda seed: behind_metadata(encoded(photo(seed), "JPEG", exif=camera_exif(seed)), seed),
    ),
    "png": ("png", lambda seed: encoded(photo(seed), "PNG")),
    "png metadata": ("png", png_with_metadata),
}


def write_shard(path: Path, kind: str, images: int) -> float:
    """A shard of images with their records; returns the mean size of an image in bytes."""
    extension, make = KINDS[kind]
    files = [make(seed) for seed in range(DISTINCT)]
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(images):
            for name, raw in ((extension, files[number % DISTINCT]), ("json", b'{"caption": "an image"}')):
                info = tarfile.TarInfo(f"{number:06d}.{name}")
                info.size = len(raw)
                tar.addfile(info, io.BytesIO(raw))
    return statistics.mean(map(len, files))


def counted(path: Path, images: int) -> tuple[list, float, float]:
    """(sizes of the images, bytes and reads for each)."""
    lengths = []

    def parse(read: ReadRange, size: int) -> ImageHeader | None:
        def counting(length: int, offset: int) -> bytes:
            raw = read(length, offset)
            lengths.append(len(raw))
            return raw

        return parse_header(counting, size)

    headers.parse_header = parse
    found = indexing.build_index(path)
    sizes = [(member.height, member.width) for row in range(len(found)) for member in found.members(row)[:1]]
    return sizes, sum(lengths) / images, len(lengths) / images


def timed(path: Path, images: int, blocks: int) -> dict[str, list[float]]:
    """Seconds of the processor for each image that is indexed, by parser, a number for each block."""
    seconds = {name: [] for name in PARSERS}
    for block in range(blocks):
        for name in random.Random(block).sample(list(PARSERS), len(PARSERS)):
            headers.parse_header = PARSERS[name]
            before = time.process_time()
            indexing.build_index(path)
            seconds[name].append((time.process_time() - before) / images)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000, help="images of a shard")
    parser.add_argument("--blocks", type=int, default=20, help="how often each parser indexes the shard")
    parser.add_argument("--kind", choices=KINDS, action="append", help="kinds of images (default: all)")
    args = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="image_headers_"))
    try:
        for kind in args.kind or KINDS:
            path = scratch / "s.tar"
            mean = write_shard(path, kind, args.images)
            sizes, read, reads = counted(path, args.images)
            assert (0, 0) not in sizes
            seconds = timed(path, args.images, args.blocks)
            times = "  ".join(
                f"{name} {statistics.median(values) * 1e6:.1f} us ({min(values) * 1e6:.1f} to {max(values) * 1e6:.1f})"
                for name, values in seconds.items()
            )
            print(f"{kind}, {mean / 1000:.0f} kB an image: {times}; {read:,.0f} bytes in {reads:.1f} reads", flush=True)
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
