"""Files and turns of a conversation as tokens and encoder inputs, as in training."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.collate import collate_media
from data.errors import RecordError
from data.media.decode import decode_frames, decode_media
from data.media.headers import parse_extent_bytes, parse_video_header_bytes
from data.media.options import colour_of
from data.records.conversation import MARKERS, Conversation, Part, Turn, split_markers, with_media
from data.records.markers import unknown_marker, with_our_markers
from data.samples.media_spec import Media
from data.text.placeholders import Place, axis_positions
from data.text.tokens import Tokenizer
from data.text_format import plural
from mimo_train.config.errors import UserError
from mimo_train.config.schema import ConfigContainer
from mimo_train.inputs.datasets import bounds_of, media_of, sampling_of

NAMES = {"image": "image", "video": "video", "audio": "clip"}
"""Word for a file in messages, by its kind."""


@dataclass(frozen=True)
class Medium:
    """An image, video or audio clip in the form of the modules that take it."""

    kind: str
    tokens: list[tuple[int, int]]
    """(placeholder id, number of tokens) of each module."""
    inputs: dict[str, torch.Tensor]
    """By module: uint8 [3, height, width] or float32 [samples]."""
    places: dict[str, Place]
    """By module: number of tokens, and their grid for positions on three axes."""
    sizes: dict[str, tuple[int, int]]
    """Input size by module; only modules that cut images into tiles."""
    among_several: "Medium | None" = None
    """The same file in a conversation with several of its kind, if it is read differently there."""
    frames: "tuple[Medium, ...]" = ()
    """Images of a video; its other fields are empty."""


@dataclass(frozen=True)
class Prompt:
    """A prompt that a model continues."""

    ids: list[int]
    inputs: dict[str, dict[str, Any] | None]
    """Arguments of every module's encoder; None if it has no input."""
    rows: dict[str, int]
    """Rows of features of every encoder module: its placeholders in `ids`."""
    positions: torch.Tensor | None = None
    """Positions of `ids` on three axes, int64 [3, S], if the model has these; None: 0, 1, 2, ..."""


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
        readers = [item for item in self._modules if item.kind == ("image" if kind == "video" else kind)]
        if not readers:
            raise UserError(f"--{kind}: no module of this model reads {NAMES[kind]}s, it has {', '.join(self._names)}")
        try:
            raw = file.read_bytes()
        except OSError as error:
            raise UserError(f"--{kind}: cannot read {file}: {error.strerror or error}") from error
        if kind == "video":
            return self._video(raw, file)
        extent = parse_extent_bytes(kind, raw)
        if extent is None:
            raise UserError(f"--{kind}: {file} ({len(raw)} bytes) has no readable {NAMES[kind]} header")
        alone = self._medium(kind, raw, {item.module: extent for item in readers})
        if all(item.cut_several for item in readers):
            return alone
        several = {item.module: item.extents([extent] * 2)[0] for item in readers}
        return replace(alone, among_several=self._medium(kind, raw, several))

    def _video(self, raw: bytes, file: Path) -> Medium:
        header = parse_video_header_bytes(raw)
        if header is None:
            raise UserError(f"--video: {file} ({len(raw)} bytes) has no readable header of a video")
        count = self._sampling.count(header.milliseconds)
        readers = [item for item in self._modules if item.kind == "image"]

        def frames(together: int) -> tuple[Medium, ...]:
            """Read the frames as among `together` images."""
            own = {item.module: item.extents([(header.height, header.width)] * together)[0] for item in readers}
            images = {item.module: self._images(item, raw, count, own[item.module]) for item in readers}
            inputs = ({name: found[at] for name, found in images.items()} for at in range(count))
            return tuple(self._as_read("image", own, one) for one in inputs)

        found = frames(count)
        if count == 1 and not all(item.cut_several for item in readers):
            found = (replace(found[0], among_several=frames(2)[0]),)
        return Medium("video", [], {}, {}, {}, frames=found)

    def _images(self, item: Media, raw: bytes, count: int, extent: tuple[int, int]) -> list[torch.Tensor]:
        canvas = item.canvas(*extent) if item.canvas else None
        return decode_frames(raw, count, item.size(*extent), item.resize, canvas, self._bounds)

    def _medium(self, kind: str, raw: bytes, extents: dict[str, tuple[int, int]]) -> Medium:
        inputs = {}
        for item in self._modules:
            if item.module in extents:
                extent = extents[item.module]
                canvas = item.canvas(*extent) if item.canvas else None
                inputs[item.module] = decode_media(
                    kind, raw, item.size(*extent), item.resize, canvas, self._bounds, self._background
                )
        return self._as_read(kind, extents, inputs)

    def _as_read(self, kind: str, extents: dict[str, tuple[int, int]], inputs: dict[str, torch.Tensor]) -> Medium:
        readers = [(item, extents[item.module]) for item in self._modules if item.module in extents]
        return Medium(
            kind,
            [(self._places[item.module], item.sequence_tokens(*extent)) for item, extent in readers],
            inputs,
            {
                item.module: (item.sequence_tokens(*ext), item.grid(*ext) if item.grid else None)
                for item, ext in readers
            },
            {item.module: item.size(*extent) for item, extent in readers if item.canvas},
        )

    def of_conversation(self, turns: Sequence[Turn], media: Sequence[Medium]) -> Prompt:
        """Return the prompt for the next answer; `media` has each kind in the order of its placeholders."""
        turns, media = _with_frames(turns, media)
        kinds = {item.kind for item in self._modules}
        several = {kind for kind in kinds if sum(medium.kind == kind for medium in media) > 1}
        media = [(medium.among_several if medium.kind in several else None) or medium for medium in media]
        tokens = {kind: [medium.tokens for medium in media if medium.kind == kind] for kind in kinds}
        return self._prompt(self._tokenizer.template.prompt(Conversation(tuple(turns)), tokens), media)

    def of_text(self, text: str) -> Prompt:
        """Return the prompt of a text that the model continues."""
        begin = [] if self._tokenizer.begin_id is None else [self._tokenizer.begin_id]
        return self._prompt(begin + self._tokenizer.encode(text), ())

    def _prompt(self, ids: list[int], media: Sequence[Medium]) -> Prompt:
        inputs = {}
        for item in self._modules:
            own = collate_media([one.inputs[item.module] for one in media if item.module in one.inputs], item.field)
            if own is not None and item.canvas:
                own["sizes"] = [one.sizes[item.module] for one in media if item.module in one.sizes]
            inputs[item.module] = None if own is None else {item.module: own}
        rows = {name: ids.count(place) for name, place in self._places.items()}
        return Prompt(ids, inputs, rows, self._positions(ids, media))

    def _positions(self, ids: list[int], media: Sequence[Medium]) -> torch.Tensor | None:
        if not any(item.grid for item in self._modules):
            return None
        places = {
            self._places[item.module]: [one.places[item.module] for one in media if item.module in one.places]
            for item in self._modules
        }
        return torch.from_numpy(axis_positions(np.array(ids, dtype=np.int64), places))


def _with_frames(turns: Sequence[Turn], media: Sequence[Medium]) -> tuple[list[Turn], list[Medium]]:
    """Replace videos by their frames; returns the turns, and the media in the order of their placeholders."""
    given: dict[str, Iterator[Medium]] = {kind: iter([one for one in media if one.kind == kind]) for kind in NAMES}
    placed: list[Medium] = []
    written = []
    for turn in turns:
        parts: list[Part] = []
        for part in turn.parts:
            if part.kind == "text":
                parts.append(part)
                continue
            medium = next(given[part.kind])
            own = medium.frames or (medium,)
            placed += own
            parts += [Part(one.kind) for one in own]
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
    given = Counter(medium.kind for medium in media)
    try:
        counts = {kind: given[kind] for kind in NAMES}
        text = with_our_markers([{"from": "human", "value": text}], "from", "value", counts)[0]["value"]
    except RecordError as error:
        raise UserError(f"the message{error}") from None
    parts = with_media(text, given)
    if marker := unknown_marker(text, MARKERS):
        raise UserError(f"the message has {marker}, and no model here takes what it marks: leave it out")
    marked = Counter(part.kind for part in parts)
    if len(given) > 1 and not any(part.kind != "text" for part in split_markers(text)):
        # Without markers, media keep the order in which they are given.
        places = iter(Part(medium.kind) for medium in media)
        parts = tuple(part if part.kind == "text" else next(places) for part in parts)
    for marker, kind in MARKERS.items():
        if marked[kind] != given[kind]:
            raise UserError(
                f"the message has {marked[kind]} {marker}, and {plural(given[kind], NAMES[kind])} given: give as many, "
                f"or leave all marks out for {NAMES[kind]}s before the text"
            )
    return Turn("user", parts)
