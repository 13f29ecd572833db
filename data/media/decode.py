"""Bytes -> tensors: pictures as uint8 [3, H, W], audio as float32 [samples].

Pictures stay uint8 where the encoder's preprocessing rounds them (`Resize.rounded`): they are a quarter of float32 on
their way to the device, which normalises them. Orientation is
applied by our own header parser and not by the decoder, so that sizes agree with the index for every format.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from data.errors import DecodeError, MissingLibrary, reason_of
from data.media.audio_headers import AudioFile, chained_parts, is_cut_off, not_read_right
from data.media.background import WHITE, Colour, may_be_transparent
from data.media.bounds import BOUNDS, Bounds
from data.media.decoded_audio import container_to_decode, decoded_blocks
from data.media.headers import parse_header_bytes
from data.media.resample import resampled
from data.media.resize import STRETCHED, Resize
from data.media.video import decode_video
from data.media.vision import decode_image
from data.media.vision import resize as resize_picture

_FRAMES = 1 << 20  # of a clip, decoded at once


def decode_frames(
    raw: bytes,
    count: int,
    size: tuple[int, int],
    resize: Resize,
    canvas: tuple[int, int] | None = None,
    bounds: Bounds = BOUNDS,
) -> list[torch.Tensor]:
    """`count` pictures of a video (`decode_video`), each as `decode_media` gives one picture. Raises DecodeError."""
    pictures = decode_video(raw, count, bounds)
    if canvas is not None:
        return [_in_tiles(picture, canvas, resize, bounds) for picture in pictures]
    return [_fitted(picture, *size, resize, bounds) for picture in pictures]


def decode_media(
    kind: str,
    raw: bytes,
    size: tuple[int, int],
    resize: Resize,
    canvas: tuple[int, int] | None = None,
    bounds: Bounds = BOUNDS,
    ground: Colour | None = WHITE,
) -> torch.Tensor:
    """A picture as uint8 [3, height, width] (float32 if `resize.rounded` is False), or a clip as float32 [samples], of
    `Media.size`; a picture with a `canvas` (`Media.canvas`) as tiles, [tiles, 3, side, side]. `ground`: see
    `decode_picture`. Raises DecodeError."""
    if canvas is not None:
        return decode_tiles(raw, canvas, resize, bounds, ground)
    if kind == "image":
        return decode_resized(raw, *size, resize, bounds, ground)
    return decode_audio(raw, rate=size[1], samples=size[0], bounds=bounds)


def decode_picture(raw: bytes, bounds: Bounds = BOUNDS, ground: Colour | None = WHITE) -> torch.Tensor:
    """A file of `data.members.IMAGES` (the first frame or page) -> uint8 [3, H, W], RGB, upright.

    ground: what stands behind it where it is transparent; None leaves transparency out, as `convert("RGB")` does.

    Raises DecodeError: damaged, or above its bounds; MemoryShortage.
    """
    header = parse_header_bytes(raw)
    if header is None:
        raise DecodeError(f"no header of a picture that can be decoded in {len(raw)} bytes")
    if above := bounds.of_picture(header.height, header.width):
        raise DecodeError(above)
    try:
        if _is_for_torchvision(raw, header.format, ground):
            # bytearray: torch wants memory that it may write to.
            picture = decode_image(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        elif header.format == "HEIC":
            picture = _decode_heic(raw, ground)
        else:
            picture = _decode_with_pillow(raw, ground)
    except Exception as error:  # RuntimeError from torchvision, many types from Pillow; all mean the bytes are damaged
        raise DecodeError(f"cannot decode {len(raw)} bytes of {header.format}: {reason_of(error)}") from error
    if picture.dtype != torch.uint8:  # 16-bit PNG
        picture = (picture.to(torch.int32) >> 8).to(torch.uint8)
    picture = _upright(picture, header.orientation)
    if tuple(picture.shape) != (3, header.height, header.width):
        raise DecodeError(f"decoded to {tuple(picture.shape)}, but its header says {(3, header.height, header.width)}")
    return picture


def decode_resized(
    raw: bytes,
    height: int,
    width: int,
    resize: Resize = STRETCHED,
    bounds: Bounds = BOUNDS,
    ground: Colour | None = WHITE,
) -> torch.Tensor:
    """`decode_picture`, resized to uint8 [3, height, width] whatever its aspect ratio, or the middle of the resized
    picture."""
    return _fitted(decode_picture(raw, bounds, ground), height, width, resize, bounds)


def _fitted(picture: torch.Tensor, height: int, width: int, resize: Resize, bounds: Bounds) -> torch.Tensor:
    own_height, own_width = picture.shape[1:]
    if above := bounds.of_resized(*resize.largest(own_height, own_width)):
        raise DecodeError(above)
    whole = list(resize.whole(own_height, own_width)) if resize.shortest_edge else [height, width]
    picture = _resized(picture, whole, resize)
    top, left = (whole[0] - height) // 2, (whole[1] - width) // 2
    return picture[:, top : top + height, left : left + width].contiguous()


def decode_tiles(
    raw: bytes, canvas: tuple[int, int], resize: Resize, bounds: Bounds = BOUNDS, ground: Colour | None = WHITE
) -> torch.Tensor:
    """`decode_picture` in tiles, uint8 [tiles, 3, side, side]: first all of it as one tile, stretched; then, row by
    row, those of a black canvas with the picture in its middle, resized to fit into it. With a canvas of no size the
    first alone, and of a picture with its background around it to make a square."""
    return _in_tiles(decode_picture(raw, bounds, ground), canvas, resize, bounds)


def _in_tiles(picture: torch.Tensor, canvas: tuple[int, int], resize: Resize, bounds: Bounds) -> torch.Tensor:
    side = resize.tile
    height, width = picture.shape[1:]
    if not min(canvas):
        square = resize.largest(height, width, cut=False)
        if above := bounds.of_resized(*square):
            raise DecodeError(above)
        return _resized(_centred(picture, square, resize.background), [side] * 2, resize)[None]
    down, across = canvas[0] / height, canvas[1] / width
    if across < down:
        fitted = [min(math.ceil(height * across), canvas[0]), canvas[1]]
    else:
        fitted = [canvas[0], min(math.ceil(width * down), canvas[1])]
    whole = _centred(_resized(picture, fitted, resize), canvas, (0, 0, 0))
    tiles = whole.unfold(1, side, side).unfold(2, side, side)  # 3, rows, columns, side, side
    return torch.cat([_resized(picture, [side] * 2, resize)[None], tiles.permute(1, 2, 0, 3, 4).flatten(0, 1)])


def decode_audio(raw: bytes, rate: int, samples: int | None = None, bounds: Bounds = BOUNDS) -> torch.Tensor:
    """A file of `data.members.AUDIO` -> float32 [samples], mono (mean of the channels), `rate` samples a second.

    Whole numbers of any width are divided by their largest magnitude, so that FLAC and WAV of one recording give equal
    numbers in [-1, 1); floats stay as they are, also above 1.
    `samples`: cut or padded with zeros to this length; None keeps the clip's own.

    Raises DecodeError: damaged, or above its bounds; MemoryShortage.
    """
    import soundfile

    if is_cut_off(raw):
        raise DecodeError(f"{len(raw)} bytes of audio: the end of the file is missing")
    blocks, frames, clip_rate = [], 0, 0
    try:
        for block, own_rate in _mono_blocks(raw, bounds):
            frames += len(block)
            if own_rate != (clip_rate or own_rate):
                raise DecodeError(f"its parts have different rates ({clip_rate} and {own_rate} Hz)")
            if above := bounds.of_clip(frames, own_rate):
                raise DecodeError(above)
            blocks.append(block)
            clip_rate = own_rate
    except DecodeError:
        raise
    except soundfile.LibsndfileError as error:  # without the object that was opened, which is its text too
        raise DecodeError(f"cannot decode {len(raw)} bytes of audio: {error.error_string}") from error
    except Exception as error:  # RuntimeError, and what else there may be, means the same
        raise DecodeError(f"cannot decode {len(raw)} bytes of audio: {reason_of(error)}") from error
    if not frames:
        raise DecodeError(f"no audio in {len(raw)} bytes")
    mono = np.concatenate(blocks)
    if not np.isfinite(mono).all():
        raise DecodeError(f"{len(raw)} bytes of audio hold samples that are not finite")
    wave = torch.from_numpy(mono)
    if clip_rate != rate:
        wave = resampled(wave, clip_rate, rate)
    if samples is not None:
        wave = torch.nn.functional.pad(wave[:samples], (0, max(samples - len(wave), 0)))
    return wave


def _mono_blocks(raw: bytes, bounds: Bounds) -> Iterator[tuple[np.ndarray, int]]:
    """(float32 [samples], samples per second) of a clip, piece by piece: the mean of its channels, which are never all
    in memory. Raises DecodeError."""
    import soundfile

    for part in chained_parts(raw):
        with soundfile.SoundFile(AudioFile(part)) as file:
            if container := container_to_decode(file.format, file.frames, raw):
                yield from decoded_blocks(raw, container)
                return
            above = bounds.of_clip(file.frames, file.samplerate)
            if wrong := above or not_read_right(file.format, file.subtype):
                raise DecodeError(wrong)
            frames = 0
            # Not integers: libsndfile gives a file of floats in [-1, 1] as zeros and ones then.
            while len(block := file.read(min(_FRAMES, file.frames), dtype="float32", always_2d=True)):
                frames += len(block)
                yield block.mean(axis=1), file.samplerate
            if frames < file.frames:
                raise DecodeError(f"only {frames} of {file.frames} samples of {len(raw)} bytes of audio can be read")


def _resized(picture: torch.Tensor, size: list[int], resize: Resize) -> torch.Tensor:
    """A picture [3, H, W] stretched to `size`, (height, width)."""
    if list(picture.shape[1:]) == size:
        return picture if resize.rounded else picture.float()
    return resize_picture(picture, size[0], size[1], resize.interpolation, resize.rounded)


def _centred(picture: torch.Tensor, size: Sequence[int], colour: tuple[int, int, int]) -> torch.Tensor:
    """A picture [3, H, W] in the middle of one of `size`; of an odd border the larger part is at its right or below."""
    top, left = ((whole - own) // 2 for whole, own in zip(size, picture.shape[1:], strict=True))
    found = torch.tensor(colour, dtype=picture.dtype)[:, None, None].repeat(1, *size)
    found[:, top : top + picture.shape[1], left : left + picture.shape[2]] = picture
    return found


def _is_for_torchvision(raw: bytes, kind: str, ground: Colour | None) -> bool:
    """Whether it is read by torchvision, which leaves transparency out and reads no animated WebP."""
    if kind == "JPEG":
        return True
    if kind == "WEBP" and raw[12:16] == b"VP8X" and raw[20] & 0x02:
        return False
    return kind in ("PNG", "WEBP") and not (ground is not None and may_be_transparent(raw, kind))


def _decode_with_pillow(raw: bytes, ground: Colour | None) -> torch.Tensor:
    from PIL import Image

    with Image.open(io.BytesIO(raw)) as picture:
        if picture.mode in ("I", "F"):
            raise DecodeError(f"pixels of the type {picture.mode!r} have no known range: write them with 8 or 16 bits")
        if picture.mode.startswith("I;16"):
            # Pillow's own conversion to RGB cuts values above 255 off.
            grey = np.array(picture).astype(np.int64)
            shades = ((grey + 128) // 257).astype(np.uint8)
            return torch.from_numpy(shades).expand(3, -1, -1)
        return _flat(picture, ground)


def _decode_heic(raw: bytes, ground: Colour | None) -> torch.Tensor:
    try:
        from pillow_heif import open_heif
    except ImportError as error:
        said = "pillow-heif, which decodes HEIC, is not installed: pip install 'mimo-train[heic]'"
        raise MissingLibrary(said) from error
    return _flat(open_heif(io.BytesIO(raw)).to_pillow(), ground)


def _flat(picture: Any, ground: Colour | None) -> torch.Tensor:
    """A picture of Pillow in three colours."""
    from PIL import Image

    if ground is not None and picture.has_transparency_data:
        layer = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", layer.size, (*ground, 255)), layer)
    return torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1)


def _upright(picture: torch.Tensor, orientation: int) -> torch.Tensor:
    """Undoes the EXIF orientation of [3, H, W]: values above 4 swap height and width, then one or two mirrors."""
    if orientation >= 5:
        picture = picture.transpose(1, 2)
    mirrors = {2: [2], 3: [1, 2], 4: [1], 6: [2], 7: [1, 2], 8: [1]}.get(orientation)
    return picture.flip(mirrors) if mirrors else picture
