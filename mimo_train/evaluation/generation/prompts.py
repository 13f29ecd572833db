"""Files and turns of a conversation as tokens and encoder inputs, as in training."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from data.collate import collate_media
from data.errors import DecodeError, RecordError
from data.media.audio import decode_audio, decode_sound
from data.media.decode import decode_image_file, fitted
from data.media.headers import parse_extent_bytes, read_video_header, reader_of
from data.media.options import colour_of
from data.media.video import decode_video
from data.records.conversation import MARKERS, Conversation, Part, Turn, split_markers, with_media
from data.records.markers import unknown_marker, with_our_markers
from data.samples.media_spec import Media, MediaInput, is_video
from data.samples.positions import by_class
from data.text.placeholders import ItemText, Place, axis_positions, blocks_of
from data.text.tokens import Tokenizer
from data.text_format import plural
from encoders.transformers_media.video_keys import FRAMES
from mimo_train.config.errors import UserError
from mimo_train.config.schema import ConfigContainer
from mimo_train.inputs.datasets import bounds_of, media_of, sampling_of

NAMES = {"image": "image", "video": "video", "audio": "clip"}
"""Word for a file in messages, by its kind."""
SOUND = "sound"
"""Kind of the sound of a video."""


@dataclass(frozen=True)
class Medium:
    """An image, video or audio clip of a conversation, before it is fitted to a module's input."""

    kind: str
    extent: tuple[int, ...] = (0, 0)
    """(height, width), (samples per channel, samples per second), or that of a video that is one item."""
    image: torch.Tensor | None = None
    """uint8 [3, height, width]."""
    raw: bytes = b""
    """The file, of audio and of a video that is one item."""
    frames: "tuple[Medium, ...]" = ()
    """Images of another video."""

    @property
    def sound(self) -> "Medium | None":
        """The sound of a video, if it is read."""
        return Medium(SOUND, (self.extent[-1], 1000), raw=self.raw) if len(self.extent) > FRAMES else None


class Input(NamedTuple):
    """An item as a module takes it, its size or extent, the number of its features with their grid, if any, and its
    text."""

    tensors: list[MediaInput]
    size: tuple[int, ...]
    place: Place
    text: ItemText
    kind: str


@dataclass(frozen=True)
class Prompt:
    """A prompt that a model continues."""

    ids: list[int]
    inputs: dict[str, dict[str, Any] | None]
    """Arguments of every module's encoder; None if it has no input."""
    rows: dict[str, int]
    """Rows of features of every encoder module: its placeholders in `ids`."""
    positions: torch.Tensor | None = None
    """Positions of `ids` on several axes, int64 [axes, S], if the model has these; None: 0, 1, 2, ..."""
    blocks: torch.Tensor | None = None
    """Tokens with one number see each other, -1: only earlier ones; int64 [S]. None: all of them -1."""
    sizes: Mapping[str, Sequence[tuple[int, ...]]] = field(default_factory=dict)
    """`Media.size` of every module's items."""

    def positions_to(self, length: int) -> torch.Tensor:
        """Return positions of the prompt and text after it: int64 [1, length], or [axes, 1, length] on several."""
        if self.positions is None:
            return torch.arange(length)[None]
        rest = self.positions.max() + 1 + torch.arange(length - len(self.ids))
        return torch.cat([self.positions, rest.expand(len(self.positions), -1)], dim=1)[:, None]

    def blocks_to(self, length: int) -> torch.Tensor:
        """Return `blocks` of the prompt and text after it, int64 [length]."""
        blocks = torch.full((length,), -1, dtype=torch.int64)
        if self.blocks is not None:
            blocks[: len(self.ids)] = self.blocks
        return blocks


class Prompts:
    """Makes the prompts of a model."""

    def __init__(self, cfg: ConfigContainer, tokenizer: Tokenizer):
        self._tokenizer, self._modules, self._names = tokenizer, media_of(cfg), list(cfg.modules)
        self._bounds, self._background, self._sampling = (
            bounds_of(cfg),
            colour_of(cfg.data.background),
            sampling_of(cfg),
        )
        self._places = {item.module: tokenizer.placeholder_id(item.placeholder) for item in self._modules}

    def medium(self, kind: str, file: Path) -> Medium:
        """Read an image (`image`), a `video` or a clip (`audio`).

        Raises:
            UserError: no module of the model takes this kind, or the file cannot be read.
            DecodeError: the file is damaged.
        """
        self.require_reader(kind, f"--{kind}")
        try:
            raw = file.read_bytes()
        except OSError as error:
            raise UserError(f"--{kind}: cannot read {file}: {error.strerror or error}") from error
        return self.medium_of(kind, raw, f"--{kind}: {file}")

    def require_reader(self, kind: str, name: str) -> None:
        """Raise UserError, with `name` in front, if no module of the model takes this kind."""
        if not any(item.kind == ("image" if kind == "video" else kind) for item in self._modules):
            raise UserError(f"{name}: no module of this model reads {NAMES[kind]}s, it has {', '.join(self._names)}")

    def medium_of(self, kind: str, raw: bytes, name: str) -> Medium:
        """Decode a file's bytes as `medium` does; `name` begins its errors."""
        self.require_reader(kind, name)
        if kind == "video":
            try:
                header = read_video_header(reader_of(raw), len(raw))
            except DecodeError as error:
                raise UserError(f"{name} ({len(raw)} bytes) has no readable header of a video: {error}") from error
            if any(item.video_frames for item in self._modules):
                rate = header.rate
                extent = header.height, header.width, header.frames, rate.numerator, rate.denominator
                has_sound = header.sound and any(item.sound for item in self._modules)
                return Medium(kind, (*extent, header.sound) if has_sound else extent, raw=raw)
            frames = decode_video(raw, self._sampling.count(header.milliseconds), self._bounds)
            return Medium(kind, frames=tuple(Medium("image", (header.height, header.width), frame) for frame in frames))
        size = parse_extent_bytes(kind, raw)
        if size is None:
            raise UserError(f"{name} ({len(raw)} bytes) has no readable {NAMES[kind]} header")
        if kind == "audio":
            return Medium(kind, size, raw=raw)
        return Medium(kind, size, decode_image_file(raw, self._bounds, self._background))

    def of_conversation(self, turns: Sequence[Turn], media: Sequence[Medium]) -> Prompt:
        """Return the prompt for the next answer; `media` has each kind in the order of its placeholders. Raises
        DecodeError if audio is damaged."""
        turns, media = _with_frames(turns, media)
        inputs = self.inputs(media)
        texts: dict[str, list[list[tuple[int, ItemText]]]] = {}
        for kind in {item.kind for item in self._modules}:
            readers = [item.module for item in self._modules if item.kind == kind]
            for of_item in zip(*(inputs[module] for module in readers), strict=True):
                of_modules = [(self._places[module], each.text) for module, each in zip(readers, of_item, strict=True)]
                texts.setdefault(of_item[0].kind, []).append(of_modules)
        return self.with_inputs(self._tokenizer.template.prompt(Conversation(tuple(turns)), texts), inputs)

    def inputs(self, media: Sequence[Medium]) -> dict[str, list[Input]]:
        """Return the media as each module takes them in a sample that has them all."""
        inputs: dict[str, list[Input]] = {}
        for item in self._modules:
            of_kind = _read_by(item, media)
            inputs[item.module] = []
            extents = item.extents([medium.extent for medium in of_kind])
            tokens = [item.sequence_tokens(*extent) for extent in extents]
            texts = item.texts(self._places[item.module], extents, tokens)
            for medium, extent, count, text in zip(of_kind, extents, tokens, texts, strict=True):
                values = self._values(item, medium, extent)
                size = extent if is_video(extent) else item.size(*extent)
                place = count, item.grid(*extent) if item.grid else None
                inputs[item.module].append(Input(values, size, place, text, medium.kind))
        return inputs

    def _values(self, item: Media, medium: Medium, extent: tuple[int, ...]) -> list[MediaInput]:
        if medium.kind == "video":
            return item.of_video(medium.raw, extent, self._bounds, range(item.parts(extent)))
        first, second = item.size(*extent)
        if medium.image is None:
            decode = decode_sound if medium.kind == SOUND else decode_audio
            tensor = decode(medium.raw, rate=second, samples=first, bounds=self._bounds)
        else:
            canvas = item.canvas(*extent) if item.canvas else None
            tensor = fitted(medium.image, (first, second), item.resize, canvas, self._bounds)
        return [tensor if item.read is None else item.read(tensor)]

    def of_text(self, text: str) -> Prompt:
        """Return the prompt of a text that the model continues."""
        begin = [] if self._tokenizer.begin_id is None else [self._tokenizer.begin_id]
        return self.with_inputs(begin + self._tokenizer.encode(text), self.inputs(()))

    def with_inputs(self, ids: list[int], inputs: dict[str, list[Input]]) -> Prompt:
        """Return the prompt of tokens with placeholders for `inputs`."""
        arguments = {}
        for item in self._modules:
            batch = collate_media([value for each in inputs[item.module] for value in each.tensors], item.field)
            if batch is not None and item.canvas:
                batch["sizes"] = [each.size for each in inputs[item.module]]
            arguments[item.module] = None if batch is None else {item.module: batch}
        rows = {name: ids.count(placeholder) for name, placeholder in self._places.items()}
        positions = None
        of_class = next((item for item in self._modules if item.positions), None)
        sizes = [] if of_class is None else [each.size for each in inputs[of_class.module]]
        if of_class is not None and of_class.positions is not None and by_class(of_class, sizes):
            positions = torch.from_numpy(of_class.positions(np.array(ids, dtype=np.int64), sizes))
        elif any(item.grid for item in self._modules):
            places = {self._places[name]: [each.place for each in of_module] for name, of_module in inputs.items()}
            positions = torch.from_numpy(axis_positions(np.array(ids, dtype=np.int64), places))
        kinds = {self._places[item.module]: item.bidirectional for item in self._modules if item.bidirectional}
        types = [token for item in self._modules if item.bidirectional for token in item.types]
        numbers = np.zeros_like(ids) if "prefix" in kinds.values() else blocks_of(np.array(ids), [*kinds, *types])
        blocks = torch.from_numpy(numbers) if (numbers >= 0).any() else None
        of_modules: dict[str, list[tuple[int, ...]]] = {}
        for item in self._modules if inputs else ():
            of_items = [(each.size, item.parts(each.size)) for each in inputs[item.module]]
            of_modules[item.module] = [
                item.size(*size) if is_video(size) else size for size, parts in of_items for _ in range(parts)
            ]
        return Prompt(ids, arguments, rows, positions, blocks, of_modules)


def _read_by(item: Media, media: Sequence[Medium]) -> list[Medium]:
    """Return the media that a module reads, in order; for one of audio also the sound of videos."""
    if item.kind == "audio":
        return [medium.sound or medium for medium in media if medium.kind == "audio" or medium.sound]
    return [medium for medium in media if medium.kind == "image" or (medium.kind == "video" and item.video_frames)]


def _with_frames(turns: Sequence[Turn], media: Sequence[Medium]) -> tuple[list[Turn], list[Medium]]:
    """Replace videos by their frames; returns the turns, and the media in the order of their placeholders."""
    remaining: dict[str, Iterator[Medium]] = {
        kind: iter([item for item in media if item.kind == kind]) for kind in NAMES
    }
    placed: list[Medium] = []
    written = []
    for turn in turns:
        parts: list[Part] = []
        for part in turn.parts:
            if part.kind == "text":
                parts.append(part)
                continue
            medium = next(remaining[part.kind])
            frames = medium.frames or (medium,)
            placed += frames
            parts += [Part(item.kind) for item in frames]
        written.append(replace(turn, parts=tuple(parts)))
    return written, placed


def user_turn(text: str, media: Sequence[Medium]) -> Turn:
    """Return the user's turn with media at the markers `<image>`, `<video>` and `<audio>`, as in training records.
    Without markers the media come before the text; without a text they stand alone, as in a caption record.

    Raises:
        UserError: markers and media of a kind differ in number, or no module takes a marker's kind.
    """
    # A command-line argument may hold bytes that are not text.
    text = text.encode("utf-8", "replace").decode()
    number_of_kind = Counter(medium.kind for medium in media)
    try:
        counts = {kind: number_of_kind[kind] for kind in NAMES}
        text = with_our_markers([{"from": "human", "value": text}], "from", "value", counts)[0]["value"]
    except RecordError as error:
        raise UserError(f"the message{error}") from None
    parts = with_media(text, number_of_kind)
    if marker := unknown_marker(text, MARKERS):
        raise UserError(f"the message has {marker}, and no model here takes what it marks: leave it out")
    marked = Counter(part.kind for part in parts)
    if len(number_of_kind) > 1 and not any(part.kind != "text" for part in split_markers(text)):
        # Without markers, media keep the order in which they are given.
        places = iter(Part(medium.kind) for medium in media)
        parts = tuple(part if part.kind == "text" else next(places) for part in parts)
    for marker, kind in MARKERS.items():
        if marked[kind] != number_of_kind[kind]:
            raise UserError(
                f"the message has {marked[kind]} {marker}, and {plural(number_of_kind[kind], NAMES[kind])} given: "
                f"give as many, or leave all marks out for {NAMES[kind]}s before the text"
            )
    return Turn("user", parts)
