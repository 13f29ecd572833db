"""Conversations: turns of text and media.

In a text, `<image>`, `<video>` and `<audio>` are the positions of media. A line break next to a marker, as in LLaVA
records, is not part of the message: clients of served models do not send it either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from data.errors import RecordError
from data.text_format import Key, shown

MARKERS = {"<image>": "image", "<video>": "video", "<audio>": "audio"}
KINDS = tuple(MARKERS.values())
"""Kinds of media, in their order before a text without markers."""
PART_KINDS = {
    "image": "image",
    "image_url": "image",
    "video": "video",
    "video_url": "video",
    "audio": "audio",
    "input_audio": "audio",
    "audio_url": "audio",
}
"""Type of a content part -> kind of its media."""
_MARKER = "|".join(map(re.escape, MARKERS))
_SPLIT = re.compile(rf"(?:\r?\n)?({_MARKER})(?:\r?\n)?")
_NUMBERED = re.compile(r".*\d.*[.][^.]*")  # a number before the last dot


@dataclass(frozen=True)
class Part:
    """A piece of a turn: `kind` is "text", "image", "video" or "audio"; `text` is empty for the last three."""

    kind: str
    text: str = ""


_MEDIA_PARTS = {marker: Part(kind) for marker, kind in MARKERS.items()}
NO_FIELDS: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Visual:
    extension: str
    frames: int
    """Number of images that a video becomes; 0 for an image, and for a video that is one item."""
    is_video: bool = False
    """True for a video that is one item."""

    @property
    def kind(self) -> str:
        """The kind: "image" or "video"."""
        return "video" if self.frames or self.is_video else "image"


@dataclass(frozen=True)
class Turn:
    """A message. `role` is user, assistant, system, developer, tool or function. "plain" is a text without roles: all
    of it has loss."""

    role: str
    parts: tuple[Part, ...]
    fields: Mapping[str, Any] = field(default_factory=lambda: NO_FIELDS)
    """Fields of the message besides role and content, such as `tool_calls`; no nulls."""
    typed: bool | None = field(default=False, compare=False)
    """True if the content is a list of typed parts; None if the message has tool calls and no content."""
    has_loss: bool = True
    """False if the record excludes the message from the loss."""
    has_separators: bool = field(default=False, compare=False)
    """True if line breaks next to markers were removed."""

    @property
    def is_learned(self) -> bool:
        """True if this turn has loss."""
        return self.has_loss and self.role in ("assistant", "plain")

    @property
    def text(self) -> str:
        return "".join([part.text for part in self.parts])

    @property
    def marked_text(self) -> str:
        """The text with its inner markers, without leading and trailing ones."""
        marked = "".join(part.text if part.kind == "text" else f"<{part.kind}>" for part in self.parts)
        return re.sub(rf"^(?:{_MARKER}|\s)+|(?:{_MARKER}|\s)+$", "", marked)


@dataclass(frozen=True)
class Conversation:
    """The turns of a record, and the descriptions of its tools."""

    turns: tuple[Turn, ...]
    tools: tuple[Any, ...] = ()

    def count(self, kind: str) -> int:
        """Return the number of parts of a kind."""
        return sum(part.kind == kind for turn in self.turns for part in turn.parts)

    @property
    def is_blank(self) -> bool:
        """True if no answer has a character to learn."""
        return not any(turn.is_learned and (turn.fields or turn.text.strip()) for turn in self.turns)

    def question_before(self, turn: int) -> str:
        """Return the text of the last user turn before index `turn`, with its inner markers; "" if there is none."""
        return next((asked.marked_text for asked in reversed(self.turns[:turn]) if asked.role == "user"), "")


def split_markers(text: str) -> tuple[Part, ...]:
    """Split a text at its media markers; line breaks next to markers are removed."""
    if "<" not in text:
        return (Part("text", text),) if text else ()
    return tuple([_MEDIA_PARTS.get(piece) or Part("text", piece) for piece in _SPLIT.split(text) if piece])


def with_media(text: str, media: Mapping[str, int], visuals: Sequence[Visual] = ()) -> tuple[Part, ...]:
    """Return the parts of a question: media at its markers, or in front if it has none. See `media_first`."""
    parts = split_markers(text)
    if any(part.kind != "text" for part in parts):
        return parts
    return (*media_first(media, visuals), *parts)


def media_first(media: Mapping[str, int], visuals: Sequence[Visual] = ()) -> tuple[Part, ...]:
    """Return the parts of unmarked media (kind -> members), in the order of `visuals` or with images first."""
    kinds = [visual.kind for visual in visuals]
    kinds = kinds or [kind for kind in ("image", "video") for _ in range(media.get(kind, 0))]
    return tuple(Part(kind) for kind in [*kinds, *["audio"] * media.get("audio", 0)])


def with_frames(conversation: Conversation, visuals: Sequence[Visual], key: Key) -> Conversation:
    """Return the conversation with each video that is no item of its own replaced by its frames as images.

    `visuals` has an item for each image and video. If it has no video, the numbered images without an `<image>` are the
    frames of the one `<video>`. Raises RecordError if placeholders and members differ in order or number.
    """
    marks = [part.kind for turn in conversation.turns for part in turn.parts if part.kind in ("image", "video")]
    if "video" not in marks:
        return conversation
    members = ", ".join(f".{shown(visual.extension)}" for visual in visuals) or "none"
    if any(visual.kind == "video" for visual in visuals):
        if marks != [visual.kind for visual in visuals]:
            raise RecordError(
                f"key {key!r}: the record marks {', '.join(f'<{kind}>' for kind in marks)}, but the members are "
                f"{members}. Bring them into the same order"
            )
        frames = [visual.frames for visual in visuals if visual.kind == "video"]
    else:
        first, count = marks.index("video"), len(visuals) - marks.count("image")
        numbered = visuals[first : first + count] if marks.count("video") == 1 and count > 0 else ()
        if not numbered or not all(_NUMBERED.fullmatch(visual.extension) for visual in numbered):
            raise RecordError(
                f"key {key!r}: the record has {marks.count('video')} <video>, but the sample has no video member, and "
                f"no numbered images (0.jpg, 1.jpg, ...) for one <video> (its images: {members})"
            )
        frames = [count]
    return replace(conversation, turns=tuple(_with_frames(conversation.turns, iter(frames))))


def _with_frames(turns: Sequence[Turn], frames: Iterator[int]) -> Iterator[Turn]:
    for turn in turns:
        parts: list[Part] = []
        for part in turn.parts:
            images = next(frames) if part.kind == "video" else 0
            parts += [Part("image")] * images if images else [part]
        yield replace(turn, parts=tuple(parts))
