"""Conversations: turns of text and media, whatever they were read from.

In a text the markers `<image>`, `<video>` and `<audio>` are the places of media. A line break next to a marker, as
LLaVA records have it, separates the two and is no part of the message: a client that sends an image and a text to a
served model does not write it either. The chat template decides what is between them.

A video is as many pictures of an encoder of pictures as are read of it: before a conversation becomes tokens, its
videos have become these.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from data.errors import RecordError
from data.samples.frames import Picture
from data.text_format import Key, shown

MARKERS = {"<image>": "image", "<video>": "video", "<audio>": "audio"}
KINDS = tuple(MARKERS.values())
"""Of media, in the order in which they are before a text that marks no places."""
_MARKER = "|".join(map(re.escape, MARKERS))
_SPLIT = re.compile(rf"(?:\r?\n)?({_MARKER})(?:\r?\n)?")
_NUMBERED = re.compile(r".*\d.*[.][^.]*")  # extensions with a number before the last dot


@dataclass(frozen=True)
class Part:
    """A piece of a turn: `kind` is "text", "image", "video" or "audio"; `text` is empty for the last three."""

    kind: str
    text: str = ""


_PLACES = {marker: Part(kind) for marker, kind in MARKERS.items()}
NO_FIELDS: Mapping[str, Any] = {}
"""Of a turn that has none."""


@dataclass(frozen=True)
class Turn:
    """`role`: user, assistant, system, developer, tool, function, or "plain" for a text without roles, all of which
    carries loss."""

    role: str
    parts: tuple[Part, ...]
    fields: Mapping[str, Any] = field(default_factory=lambda: NO_FIELDS)
    """What the message has besides role and content, such as `tool_calls`; nothing that is null."""
    typed: bool | None = field(default=False, compare=False)
    """Whether the record has the content as a list of typed parts; None if it has none, beside calls of tools."""
    has_loss: bool = True
    """False where the record excludes the message from the loss."""
    has_separators: bool = field(default=False, compare=False)
    """Whether line breaks next to markers were left out."""

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
        whole = "".join(part.text if part.kind == "text" else f"<{part.kind}>" for part in self.parts)
        return re.sub(rf"^(?:{_MARKER}|\s)+|(?:{_MARKER}|\s)+$", "", whole)


@dataclass(frozen=True)
class Conversation:
    """The turns of a record, and the descriptions of the tools that the assistant may call."""

    turns: tuple[Turn, ...]
    tools: tuple[Any, ...] = ()

    def count(self, kind: str) -> int:
        """Number of parts of a kind."""
        return sum(part.kind == kind for turn in self.turns for part in turn.parts)

    @property
    def is_blank(self) -> bool:
        """Whether no answer has a character to learn."""
        for turn in self.turns:
            if turn.is_learned and (turn.fields or turn.text.strip()):
                return False
        return True

    @property
    def question_and_truth(self) -> tuple[str, str]:
        """Question and text of the last learned turn; both are empty if no turn is learned."""
        last = next((at for at in reversed(range(len(self.turns))) if self.turns[at].is_learned), None)
        return ("", "") if last is None else (self.question_before(last), self.turns[last].text.strip())

    def question_before(self, turn: int) -> str:
        """Text of the last user turn before turn number `turn`, with the markers inside it; empty if there is none."""
        return next((one.marked_text for one in reversed(self.turns[:turn]) if one.role == "user"), "")


def split_markers(text: str) -> tuple[Part, ...]:
    """Return the pieces of a text, with the places of media that it marks and without the line breaks next to these."""
    if "<" not in text:
        return (Part("text", text),) if text else ()
    return tuple([_PLACES.get(piece) or Part("text", piece) for piece in _SPLIT.split(text) if piece])


def with_media(text: str, media: Mapping[str, int], pictures: Sequence[Picture] = ()) -> tuple[Part, ...]:
    """Return the pieces of what a user says about media: at the places that it marks; without any mark, the media
    before it. Takes the arguments of `media_first`."""
    parts = split_markers(text)
    if any(part.kind != "text" for part in parts):
        return parts
    return (*media_first(media, pictures), *parts)


def media_first(media: Mapping[str, int], pictures: Sequence[Picture] = ()) -> tuple[Part, ...]:
    """The places of media that no text marks.

    Args:
        media: how many there are of a kind.
        pictures: the pictures and videos among them, where their order is known; else pictures are first.
    """
    kinds = ["video" if one.frames else "image" for one in pictures]
    kinds = kinds or [kind for kind in ("image", "video") for _ in range(media.get(kind, 0))]
    return tuple(Part(kind) for kind in [*kinds, *["audio"] * media.get("audio", 0)])


def with_frames(conversation: Conversation, pictures: Sequence[Picture], key: Key) -> Conversation:
    """The conversation with every video as its pictures, one behind the other.

    Without a video among `pictures`, one `<video>` is all that no `<image>` takes, which must be numbered pictures.

    Args:
        pictures: those of the sample, as many as the conversation has places.

    Raises:
        RecordError: places and members are in another order, or not as many.
    """
    marks = [part.kind for turn in conversation.turns for part in turn.parts if part.kind in ("image", "video")]
    if "video" not in marks:
        return conversation
    if any(one.frames for one in pictures):
        kinds = ["video" if one.frames else "image" for one in pictures]
        if marks != kinds:
            members = ", ".join(f".{shown(one.extension)}" for one in pictures)
            raise RecordError(
                f"key {key!r}: the record marks {', '.join(f'<{kind}>' for kind in marks)}, and the members are "
                f"{members} in this order: they must be in the same one"
            )
        frames = [one.frames for one in pictures if one.frames]
    else:
        at, several = marks.index("video"), len(pictures) - marks.count("image")
        own = pictures[at : at + several] if marks.count("video") == 1 and several > 0 else ()
        if not own or not all(_NUMBERED.fullmatch(one.extension) for one in own):
            members = ", ".join(f".{shown(one.extension)}" for one in pictures) or "none"
            raise RecordError(
                f"key {key!r}: the record has {marks.count('video')} <video>, but the sample has no video member, and "
                f"no numbered pictures (0.jpg, 1.jpg, ...) for one <video> (its pictures: {members})"
            )
        frames = [several]
    return replace(conversation, turns=tuple(_with_frames(conversation.turns, iter(frames))))


def _with_frames(turns: Sequence[Turn], frames: Iterator[int]) -> Iterator[Turn]:
    for turn in turns:
        parts: list[Part] = []
        for part in turn.parts:
            parts += [Part("image")] * next(frames) if part.kind == "video" else [part]
        yield replace(turn, parts=tuple(parts))
