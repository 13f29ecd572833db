"""Conversations: turns of text and media, whatever they were read from.

In a text the markers `<image>`, `<video>` and `<audio>` are the places of media. A line break next to a marker, as
LLaVA records have it, separates the two and is not part of the message: a client that sends an image and a text to a
served model does not write it either. The chat template decides what is between them.

A video becomes as many images as are read of it, before a conversation becomes tokens.
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
"""Kinds of media, in the order in which they come before a text that marks no places."""
_MARKER = "|".join(map(re.escape, MARKERS))
_SPLIT = re.compile(rf"(?:\r?\n)?({_MARKER})(?:\r?\n)?")
_NUMBERED = re.compile(r".*\d.*[.][^.]*")  # extensions with a number before the last dot


@dataclass(frozen=True)
class Part:
    """A piece of a turn: `kind` is "text", "image", "video" or "audio"; `text` is empty for the last three."""

    kind: str
    text: str = ""


_MEDIA_PARTS = {marker: Part(kind) for marker, kind in MARKERS.items()}
NO_FIELDS: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Visual:
    """An image or a video of a sample."""

    extension: str
    frames: int
    """Images that are read of a video; 0 for an image."""

    @property
    def kind(self) -> str:
        """ "image" or "video"."""
        return "video" if self.frames else "image"


@dataclass(frozen=True)
class Turn:
    """A message. `role`: user, assistant, system, developer, tool, function, or "plain" for a text without roles, all
    of which carries loss."""

    role: str
    parts: tuple[Part, ...]
    fields: Mapping[str, Any] = field(default_factory=lambda: NO_FIELDS)
    """What the message has besides role and content, such as `tool_calls`; no nulls."""
    typed: bool | None = field(default=False, compare=False)
    """True if the record has the content as a list of typed parts; None if it has tool calls and no content."""
    has_loss: bool = True
    """False where the record excludes the message from the loss."""
    has_separators: bool = field(default=False, compare=False)
    """True if line breaks next to markers were left out."""

    @property
    def is_learned(self) -> bool:
        """True if the loss falls on this turn."""
        return self.has_loss and self.role in ("assistant", "plain")

    @property
    def text(self) -> str:
        """The text parts, joined."""
        return "".join([part.text for part in self.parts])

    @property
    def marked_text(self) -> str:
        """The text with the markers of media inside it, without those around it."""
        marked = "".join(part.text if part.kind == "text" else f"<{part.kind}>" for part in self.parts)
        return re.sub(rf"^(?:{_MARKER}|\s)+|(?:{_MARKER}|\s)+$", "", marked)


@dataclass(frozen=True)
class Conversation:
    """The turns of a record, and the descriptions of the tools that the assistant may call."""

    turns: tuple[Turn, ...]
    tools: tuple[Any, ...] = ()

    def count(self, kind: str) -> int:
        """Return the number of parts of a kind."""
        return sum(part.kind == kind for turn in self.turns for part in turn.parts)

    @property
    def is_blank(self) -> bool:
        """True if no answer has a character to learn."""
        return not any(turn.is_learned and (turn.fields or turn.text.strip()) for turn in self.turns)

    @property
    def question_and_truth(self) -> tuple[str, str]:
        """Question and text of the last learned turn; both are empty if no turn is learned."""
        last = next((at for at in reversed(range(len(self.turns))) if self.turns[at].is_learned), None)
        return ("", "") if last is None else (self.question_before(last), self.turns[last].text.strip())

    def question_before(self, turn: int) -> str:
        """Return the text of the last user turn before turn number `turn`, with the markers inside it; empty if there
        is none."""
        return next((asked.marked_text for asked in reversed(self.turns[:turn]) if asked.role == "user"), "")


def split_markers(text: str) -> tuple[Part, ...]:
    """Return the pieces of a text, with the places of media that it marks and without the line breaks next to these."""
    if "<" not in text:
        return (Part("text", text),) if text else ()
    return tuple([_MEDIA_PARTS.get(piece) or Part("text", piece) for piece in _SPLIT.split(text) if piece])


def with_media(text: str, media: Mapping[str, int], visuals: Sequence[Visual] = ()) -> tuple[Part, ...]:
    """Return the parts of a question about media: media at the places that the text marks; without any mark, all media
    before it. Takes the arguments of `media_first`."""
    parts = split_markers(text)
    if any(part.kind != "text" for part in parts):
        return parts
    return (*media_first(media, visuals), *parts)


def media_first(media: Mapping[str, int], visuals: Sequence[Visual] = ()) -> tuple[Part, ...]:
    """Return the places of media that no text marks.

    Args:
        media: kind -> number of members.
        visuals: the images and videos, where their order is known; else images come first.
    """
    kinds = [visual.kind for visual in visuals]
    kinds = kinds or [kind for kind in ("image", "video") for _ in range(media.get(kind, 0))]
    return tuple(Part(kind) for kind in [*kinds, *["audio"] * media.get("audio", 0)])


def with_frames(conversation: Conversation, visuals: Sequence[Visual], key: Key) -> Conversation:
    """Return the conversation with every video as its images, one after the other.

    Without a video among `visuals`, the numbered images that no `<image>` takes are those of the one `<video>`.

    Args:
        visuals: images and videos of the sample, as many as the conversation has places.

    Raises:
        RecordError: places and members are in different orders, or not as many.
    """
    marks = [part.kind for turn in conversation.turns for part in turn.parts if part.kind in ("image", "video")]
    if "video" not in marks:
        return conversation
    members = ", ".join(f".{shown(visual.extension)}" for visual in visuals) or "none"
    if any(visual.frames for visual in visuals):
        if marks != [visual.kind for visual in visuals]:
            raise RecordError(
                f"key {key!r}: the record marks {', '.join(f'<{kind}>' for kind in marks)}, but the members are "
                f"{members}. Bring them into the same order"
            )
        frames = [visual.frames for visual in visuals if visual.frames]
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
            parts += [Part("image")] * next(frames) if part.kind == "video" else [part]
        yield replace(turn, parts=tuple(parts))
