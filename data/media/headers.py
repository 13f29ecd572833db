"""Read size, orientation and length of images, videos and audio files from their headers, without decoding.

The index and the decoders use the same functions, so their sizes agree.
"""

from __future__ import annotations

import io
import re
import struct
import warnings
import zlib
from typing import Any, BinaryIO, NamedTuple

from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    Jpeg2KImagePlugin,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from data.errors import MissingLibrary
from data.media.audio_files import import_av, open_no_other_file, parse_audio_header
from data.media.options import BOUNDS
from data.storage.files import RangeFile, ReadRange

warnings.filterwarnings("ignore", module="PIL")  # damaged metadata only affects the orientation

_ORIENTATION = 0x0112  # tag of EXIF and TIFF
_HEIC = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1"}
_AVIF = {b"avif", b"avis"}
_PNG_HEAD = 33  # bytes of the signature and the first chunk
_PNG_TAIL = 1 << 16  # bytes at the end of a PNG file that are searched for metadata after its pixels
_PNG_METADATA = re.compile(b"eXIf|tEXt|zTXt|iTXt")
_PNG_EXIF_TEXT = "Raw profile type exif"
_MOVIE_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")  # the first of an MP4 or MOV file
_MOST_BOXES = 1 << 16
_EBML = b"\x1aE\xdf\xa3"
_TURNS = {(1, 0, 0, 1): 0, (0, 1, -1, 0): 1, (-1, 0, 0, -1): 2, (0, -1, 1, 0): 3}
"""Display matrix of a video, without translation -> quarter turns clockwise."""


class ImageHeader(NamedTuple):
    """Header of an image. `height` and `width` are in pixels after `orientation` is applied."""

    format: str
    height: int
    width: int
    orientation: int
    """From EXIF or XMP, from 1 (upright) to 8; 1 for TIFF and HEIC, whose decoders apply it."""


class VideoHeader(NamedTuple):
    """Header of a video. `height` and `width` are in pixels after `turns`."""

    container: str
    """`mov` (also MP4) or `matroska` (also WebM), libavformat's names."""
    height: int
    width: int
    milliseconds: int
    """Length; at least 1."""
    turns: int
    """Quarter turns clockwise that make it upright."""


def parse_extent(kind: str, read: ReadRange, size: int) -> tuple[int, int] | None:
    """Return the extent of a file of `size` bytes; None without a readable header.

    It is (height, width) of an image or video, (samples per channel, samples per second) of audio.

    Raises:
        MissingLibrary: the extra that reads this type of file is not installed.
    """
    if kind == "audio":
        return parse_audio_header(read(size, 0))
    header = parse_video_header(read, size) if kind == "video" else parse_header(read, size)
    return None if header is None else (header.height, header.width)


def parse_extent_bytes(kind: str, raw: bytes) -> tuple[int, int] | None:
    """Return `parse_extent` of a file in memory."""
    return parse_extent(kind, reader_of(raw), len(raw))


def parse_header(read: ReadRange, size: int) -> ImageHeader | None:
    """Return the header of an image of `size` bytes; None if it is unreadable or damaged.

    Raises MissingLibrary if it is HEIC, and pillow-heif is not installed.
    """
    file = io.BufferedReader(RangeFile(read, size), 4096)
    return _parse(file, file.peek(256)[:256], read, size)


def parse_header_bytes(raw: bytes) -> ImageHeader | None:
    """Return `parse_header` of a file in memory."""
    return _parse(io.BytesIO(raw), raw[:256], reader_of(raw), len(raw))


def _parse(file: BinaryIO, head: bytes, read: ReadRange, size: int) -> ImageHeader | None:
    if head[4:8] == b"ftyp" and is_heic(head):
        return _parse_heic(read(size, 0), read, size)
    try:
        return _parse_with_pillow(file, head, read, size)
    except Exception:  # Pillow raises many types for damaged bytes
        return None


def parse_video_header(read: ReadRange, size: int) -> VideoHeader | None:
    """Return the header of an MP4, MOV, WebM or Matroska video; None if it is unreadable, truncated or without length.

    Raises MissingLibrary if PyAV is not installed.
    """
    magic = read(8, 0)
    container = "matroska" if magic.startswith(_EBML) else "mov" if magic[4:] in _MOVIE_BOXES else ""
    if not container or not (_segment_is_complete if container == "matroska" else _boxes_are_complete)(read, size):
        return None
    av = import_av("videos")
    try:
        # Set the container: by itself, libavformat may take a file for a list of other files to open. Skip frames: it
        # would decode the first ones of some codecs, which takes three times as long.
        options = {"max_pixels": str(BOUNDS.pixels), "skip_frame": "all"}
        with av.open(RangeFile(read, size), format=container, options=options, io_open=open_no_other_file) as file:
            stream = file.streams.video[0]
            # MP4: the stream's length. Matroska: that of the longest stream.
            length = stream.duration * stream.time_base * 1000 if stream.duration else (file.duration or 0) / 1000
            matrix = struct.unpack("9i", stream.codec_context.coded_side_data.get("display_matrix", _UPRIGHT))
            a, b, u, c, d, v = matrix[:6]
            if u or v or any(number % (1 << 16) for number in (a, b, c, d)):
                return None
            turns = _TURNS[a >> 16, b >> 16, c >> 16, d >> 16]
            height, width = (stream.height, stream.width) if turns % 2 == 0 else (stream.width, stream.height)
    except Exception:  # av.FFmpegError and others: the bytes are damaged
        return None
    if not (height > 0 and width > 0 and 0 < int(length) < 1 << 31):
        return None
    return VideoHeader(container, height, width, int(length), turns)


def parse_video_header_bytes(raw: bytes) -> VideoHeader | None:
    """Return `parse_video_header` of a file in memory."""
    return parse_video_header(reader_of(raw), len(raw))


def import_heif() -> Any:
    """Return pillow-heif. Raises MissingLibrary."""
    try:
        import pillow_heif
    except ImportError as error:
        raise MissingLibrary(
            "pillow-heif, which decodes HEIC, is not installed: pip install 'mimo-train[heic]'"
        ) from error
    return pillow_heif


def is_heic(head: bytes) -> bool:
    """True if a file that starts with these bytes is a HEIC image. AVIF images may have its brands too."""
    length = min(int.from_bytes(head[:4], "big"), len(head))
    brands = {head[at : at + 4] for at in (8, *range(16, length - 3, 4))}
    return head[4:8] == b"ftyp" and bool(brands & _HEIC) and not brands & _AVIF


_EXTENSIONS = {
    b"\xff\xd8": "jpg",
    b"\x89PNG\r\n\x1a\n": "png",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II*\0": "tif",
    b"MM\0*": "tif",
    b"\0\0\0\x0cjP  ": "jp2",
    b"\x1aE\xdf\xa3": "webm",
    b"fLaC": "flac",
    b"OggS": "ogg",
    b"ID3": "mp3",
    b"\xff\xfb": "mp3",
    b"\xff\xf3": "mp3",
    b"\xff\xf2": "mp3",
    b"FORM": "aiff",
    b".snd": "au",
    b"caff": "caf",
}
"""First bytes of a file -> extension."""


def extension_of(content: bytes) -> str:
    """Return the extension of a file by its first bytes; "" if unknown."""
    if content[:4] == b"RIFF":
        return {b"WEBP": "webp", b"WAVE": "wav"}.get(content[8:12], "")
    if content[4:8] == b"ftyp":
        return "avif" if content[8:12] in (b"avif", b"avis") else "heic" if is_heic(content[:256]) else "mp4"
    return next((extension for magic, extension in _EXTENSIONS.items() if content.startswith(magic)), "")


_FORMATS: tuple[tuple[str, tuple[bytes, ...], Any], ...] = (
    ("JPEG", (b"\xff\xd8",), JpegImagePlugin.JpegImageFile),
    ("PNG", (b"\x89PNG\r\n\x1a\n",), PngImagePlugin.PngImageFile),
    ("WEBP", (b"RIFF",), WebPImagePlugin.WebPImageFile),
    ("GIF", (b"GIF8",), GifImagePlugin.GifImageFile),
    ("BMP", (b"BM",), BmpImagePlugin.BmpImageFile),
    ("TIFF", (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), TiffImagePlugin.TiffImageFile),
    ("JPEG2000", (b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51"), Jpeg2KImagePlugin.Jpeg2KImageFile),
)
_AVIF_FILE: Any = AvifImagePlugin.AvifImageFile
_UPRIGHT = struct.pack("9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)


def _parse_with_pillow(file: BinaryIO, head: bytes, read: ReadRange, size: int) -> ImageHeader | None:
    # Image.open would raise for large images; data.bounds sets the limit instead.
    name, opened = next(
        ((name, opened) for name, magic, opened in _FORMATS if head.startswith(magic)), ("AVIF", _AVIF_FILE)
    )
    if name in ("WEBP", "AVIF"):  # Pillow reads all of these
        file = io.BytesIO(read(size, 0))
    with opened(file) as image:
        width, height = image.size
        orientation = _orientation(image)
        if name == "PNG" and not ({"exif", "xmp", _PNG_EXIF_TEXT} & image.info.keys()):
            orientation = _png_orientation(read, size)
        if name == "TIFF":
            # Its decoder makes it upright. `size` is swapped already unless only XMP gives the orientation.
            if orientation >= 5 and _ORIENTATION not in image.tag_v2:
                height, width = width, height
            orientation = 1
    if orientation >= 5:
        height, width = width, height
    return ImageHeader(name, height, width, orientation) if 0 < height < 1 << 31 and 0 < width < 1 << 31 else None


def _orientation(image: Any) -> int:
    """Return the orientation in EXIF, or in XMP if EXIF has none; 1 if neither has a valid one."""
    try:
        # The method of PNG images would decode the image.
        value = Image.Image.getexif(image).get(_ORIENTATION, 1)
    except Exception:  # metadata may be damaged while the image is not
        return 1
    return value if value in range(1, 9) else 1


def _png_orientation(read: ReadRange, size: int) -> int:
    """Return the orientation in metadata after the pixels of a PNG file, where editing programs put it."""
    start = max(size - _PNG_TAIL, _PNG_HEAD)
    tail = read(max(size - start, 0), start)
    chunks = []
    for at in (match.start() for match in _PNG_METADATA.finditer(tail)):
        end = at + 8 + int.from_bytes(tail[at - 4 : at], "big")
        if 4 <= at and end <= len(tail) and zlib.crc32(tail[at : end - 4]).to_bytes(4, "big") == tail[end - 4 : end]:
            chunks.append(tail[at - 4 : end])
    if not chunks:
        return 1
    head = read(_PNG_HEAD, 0)
    with PngImagePlugin.PngImageFile(io.BytesIO(head + b"".join(chunks) + bytes(4) + b"IDAT" + bytes(4))) as image:
        return _orientation(image)


def _parse_heic(raw: bytes, read: ReadRange, size: int) -> ImageHeader | None:
    heif = import_heif()
    if not _boxes_are_complete(read, size):
        return None
    try:
        width, height = heif.open_heif(io.BytesIO(raw)).size
    except Exception:  # pillow-heif raises several types for damaged bytes
        return None
    return ImageHeader("HEIC", height, width, 1) if height > 0 and width > 0 else None


def _boxes_are_complete(read: ReadRange, size: int) -> bool:
    """True if the boxes of an ISO media file (ISO/IEC 14496-12) end at the end of the file."""
    at = 0
    for _ in range(_MOST_BOXES):
        head = read(16, at)
        if len(head) < 8:
            break
        length, shortest = int.from_bytes(head[:4], "big"), 8
        if length == 1:
            length, shortest = int.from_bytes(head[8:16], "big"), 16
        at = size if length == 0 else at + length
        if length and length < shortest or at >= size:
            return at == size
    return False


def _segment_is_complete(read: ReadRange, size: int) -> bool:
    """True if a Matroska file (RFC 9559) has a segment of known size and is not shorter."""
    at = end = 4  # after the name of the first element
    for _ in range(2):
        head = read(8, end)
        width = 9 - head[0].bit_length() if head else 9
        length = int.from_bytes(head[:width], "big") & ((1 << 7 * width) - 1)
        if width > 8 or length == (1 << 7 * width) - 1:
            return False
        at = end + width + length
        end = at + 4
    return at <= size


def reader_of(raw: bytes) -> ReadRange:
    """Return a function that reads ranges of a file in memory."""
    return lambda length, offset: raw[offset : offset + length]
