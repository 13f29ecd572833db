"""Read size, orientation and length of images, videos and audio files from their headers, without decoding.

The index and the decoders use the same functions, so their sizes agree.
"""

from __future__ import annotations

import io
import re
import struct
import warnings
import zlib
from collections.abc import Iterator
from fractions import Fraction
from math import ceil
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

from data.errors import OF_THE_MACHINE, DecodeError, MissingLibrary, ReadError, reason_of
from data.media.audio_files import import_av, open_no_other_file, parse_audio_header
from data.media.options import BOUNDS
from data.media.video_packets import milliseconds_of, scan_packets, video_stream
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
_LONGEST_SIDE = (1 << 16) - 1  # pixels of a video, in the index
_LARGEST_DENOMINATOR = 1 << 20  # of a rate that is frames / length
_EBML, _SEGMENT = b"\x1aE\xdf\xa3", b"\x18S\x80g"
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
    """Header of a video. `height` and `width` are in pixels after `turns`, below 2^16."""

    container: str
    """`mov` (also MP4) or `matroska` (also WebM), libavformat's names."""
    height: int
    width: int
    turns: int
    """Quarter turns clockwise that make it upright."""
    frames: int
    """Number of frames that are presented, without those that an edit list discards."""
    rate: Fraction
    """Average frames per second; numerator and denominator are below 2^31."""
    sound: int
    """Milliseconds of the first sound track, rounded up and below 2^31; 0 without one."""

    @property
    def milliseconds(self) -> int:
        """Length: `frames` at `rate`; at least 1."""
        return int(milliseconds_of(self.frames, self.rate.numerator, self.rate.denominator))


def parse_extent(kind: str, read: ReadRange, size: int) -> tuple[int, int] | None:
    """Return the extent of a file of `size` bytes; None for an image or audio without a readable header.

    It is (height, width) of an image or video, (samples per channel, samples per second) of audio.

    Raises:
        DecodeError: a video has no readable header.
        MissingLibrary: the extra that reads this type of file is not installed.
    """
    if kind == "audio":
        return parse_audio_header(read(size, 0))
    header = read_video_header(read, size) if kind == "video" else parse_header(read, size)
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
    except (ReadError, *OF_THE_MACHINE):
        raise
    except Exception:  # Pillow raises many types for damaged bytes
        return None


def parse_video_header(read: ReadRange, size: int) -> VideoHeader | None:
    """Return `read_video_header`; None if it raises DecodeError."""
    try:
        return read_video_header(read, size)
    except DecodeError:
        return None


def read_video_header(read: ReadRange, size: int) -> VideoHeader:
    """Return the header of an MP4, MOV, WebM or Matroska video.

    The packets of WebM, Matroska, and fragmented MP4 files are counted, which reads the file.

    Raises:
        DecodeError: it is damaged, cut off, mirrored, or without a video track or a length.
        MissingLibrary: PyAV is not installed.
        ReadError, OSError: it cannot be read.
    """
    magic = read(8, 0)
    container = "matroska" if magic.startswith(_EBML) else "mov" if magic[4:] in _MOVIE_BOXES else ""
    if not container:
        raise DecodeError("it does not start as an MP4, MOV, WebM or Matroska file" if size else "the file is empty")
    boxes = {} if container == "matroska" else dict(_boxes(read, size))
    end = _segment_end(read, size) if container == "matroska" else max(boxes.values(), default=0)
    if end != size:
        raise DecodeError(f"it is cut off, or damaged: its parts end at byte {end} of {size}")
    if container == "mov" and b"moov" not in boxes:
        raise DecodeError("it has no header (a box moov), which is written when a recording ends")
    av = import_av("videos")
    try:
        # Set the container: by itself, libavformat may take a file for a list of other files to open. Skip frames: it
        # would decode the first ones of some codecs, which takes three times as long.
        options = {"max_pixels": str(BOUNDS.pixels), "skip_frame": "all"}
        file = av.open(
            RangeFile(read, size),
            format=container,
            options=options,
            io_open=open_no_other_file,
        )
        with file:
            return _video_header(file, container, b"moof" in boxes)
    except (DecodeError, ReadError, *OF_THE_MACHINE):
        raise
    except Exception as error:  # the bytes are damaged, unless the file cannot be read
        if isinstance(error, OSError) and not isinstance(error, av.FFmpegError):
            raise
        raise DecodeError(f"its header is damaged: {reason_of(error)}") from error


def _video_header(file: Any, container: str, is_fragmented: bool) -> VideoHeader:
    stream = video_stream(file)
    matrix = struct.unpack("9i", stream.codec_context.coded_side_data.get("display_matrix", _UPRIGHT))
    a, b, u, c, d, v = matrix[:6]
    axes = tuple(number / (1 << 16) for number in (a, b, c, d))
    if u or v or axes not in _TURNS:
        raise DecodeError(f"its display matrix {axes} is not a rotation by quarters")
    turns = _TURNS[axes]
    height, width = (stream.height, stream.width) if turns % 2 == 0 else (stream.width, stream.height)
    if not (0 < height <= _LONGEST_SIDE and 0 < width <= _LONGEST_SIDE):
        raise DecodeError(f"its sides {height} x {width} are not from 1 to {_LONGEST_SIDE} pixels")
    rate = Fraction(stream.average_rate or 0)
    entries = [] if container == "matroska" or is_fragmented else stream.index_entries
    frames = sum(entry.size > 0 and not entry.is_discard for entry in entries)
    seconds = (stream.duration or 0) * Fraction(stream.time_base)
    sound = sum((track.duration or 0) * Fraction(track.time_base) for track in file.streams.audio[:1])
    if not frames or not seconds or (file.streams.audio and not sound):
        packets = scan_packets(file, stream)
        frames, seconds, sound = len(packets.times), packets.seconds, packets.sound
    # Of Matroska files, libavformat may estimate the rate from the first frames.
    if not rate or abs(frames / rate - seconds) > seconds / 50 + 2 / rate:
        rate = (frames / seconds).limit_denominator(_LARGEST_DENOMINATOR) if seconds else Fraction(0)
    if not 0 < rate.numerator < 1 << 31 or frames >= 1 << 31:
        raise DecodeError(f"its length is unknown: {frames} frames in {float(seconds):.10g} s")
    return VideoHeader(container, height, width, turns, frames, rate, min(ceil(1000 * sound), (1 << 31) - 1))


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
    if max((end for _, end in _boxes(read, size)), default=0) != size:
        return None
    try:
        width, height = heif.open_heif(io.BytesIO(raw)).size
    except Exception:  # pillow-heif raises several types for damaged bytes
        return None
    return ImageHeader("HEIC", height, width, 1) if height > 0 and width > 0 else None


def _boxes(read: ReadRange, size: int) -> Iterator[tuple[bytes, int]]:
    """Yield (type, end) of the boxes of an ISO media file (ISO/IEC 14496-12), up to the first that is damaged. The last
    one may end after the file."""
    at = 0
    for _ in range(_MOST_BOXES):
        head = read(16, at)
        if len(head) < 8:
            return
        length, shortest = int.from_bytes(head[:4], "big"), 8
        if length == 1:
            length, shortest = int.from_bytes(head[8:16], "big"), 16
        if length and length < shortest:
            return
        at = size if length == 0 else at + length
        yield head[4:8], at


def _segment_end(read: ReadRange, size: int) -> int:
    """Return where the elements of a Matroska file (RFC 9559) end: at `size`, unless it is cut off or damaged."""
    at = 0
    while at < size:
        head = read(12, at)
        name = 9 - head[0].bit_length()
        width = 9 - head[name].bit_length() if len(head) > name else 9
        if name > 4 or width > 8 or len(head) < name + width:
            break
        length = int.from_bytes(head[name : name + width], "big") & ((1 << 7 * width) - 1)
        at += name + width
        if length == (1 << 7 * width) - 1:
            continue  # of a live recording: its parts follow
        at += length
        if head.startswith(_SEGMENT):
            return max(at, size)
    return at


def reader_of(raw: bytes) -> ReadRange:
    """Return a function that reads ranges of a file in memory."""
    return lambda length, offset: raw[offset : offset + length]
