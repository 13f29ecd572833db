"""The outline of a sample from the index alone: its members, and the number of tokens they take in every module. No
member is read, and every rank gets the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from data.errors import DataError, reason_of
from data.index.shard_index import Member
from data.media.options import BOUNDS, STRETCHED, Bounds, Resize
from data.records.conversation import Visual
from data.records.members import NO_FIELDS, READABLE, UNREADABLE, Fields
from data.records.record_checks import NO_OTHER_MEMBERS, OtherMembers
from data.samples.frames import places_of
from data.text.placeholders import Grid, Place
from data.text.templates import MediaTokens
from data.text_format import SampleKey, shown


@dataclass(frozen=True)
class Media:
    """What one encoder module needs of a sample.

    For pictures `num_tokens`, `size` and `inner_tokens` take (height, width) in pixels of the original; for audio
    (samples per channel, samples per second). All are pure; they may raise ValueError for a medium that the encoder
    cannot take.
    """

    module: str
    kind: str  # "image" | "audio"
    placeholder: str
    num_tokens: Callable[[int, int], int]
    """Tokens that one picture or clip takes in the sequence."""
    size: Callable[[int, int], tuple[int, int]]
    """What the encoder gets: (height, width); for audio (samples, samples per second)."""
    inner_tokens: Callable[[int, int], int] | None = None
    """Tokens that one picture or clip takes inside the encoder's layers; None: as many as in the sequence."""
    pairs: Callable[[int, int], int] | None = None
    """Pairs of tokens of one picture or clip that attend to each other, in a layer on average; None: all."""
    resize: Resize = STRETCHED
    """How a picture becomes one of `size`."""
    grid: Callable[[int, int], Grid | None] | None = None
    """Rows and columns of the tokens of one picture, for a language model with positions on three axes; None for any
    other language model. It gives None where the tokens form no grid."""
    canvas: Callable[[int, int], tuple[int, int]] | None = None
    """Where pictures are cut into tiles: (height, width) of what is cut; (0, 0) where nothing is. `size` is then the
    picture's own."""
    cut_several: bool = True
    """Whether pictures of a sample with several are cut into tiles too; else all functions get (0, 0) for these."""

    def __post_init__(self) -> None:
        if self.kind not in ("image", "audio"):
            raise DataError(f"modules.{self.module}: media kind {self.kind!r} is neither 'image' nor 'audio'")

    @property
    def field(self) -> str:
        """Name of its tensor in a batch."""
        return "pixels" if self.kind == "image" else "waveforms"

    def extents(self, extents: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """What the functions get for each of a sample's media of this kind, from their own extents."""
        return [(0, 0)] * len(extents) if not self.cut_several and len(extents) > 1 else list(extents)

    def above(self, own: tuple[int, int], extent: tuple[int, int], bounds: Bounds) -> str | None:
        """What is too large of what is made of a picture on its way, None if nothing is.

        Args:
            own: its (height, width); extent: what the functions get for it.
        """
        return bounds.of_resized(*self.resize.largest(*own, cut=min(extent) > 0)) if self.kind == "image" else None

    def blank_shape(self, extent: tuple[int, int]) -> tuple[int, ...]:
        """Shape of a picture's or clip's tensor."""
        first, second = self.size(*extent)
        if self.kind == "audio":
            return (first,)
        if self.canvas is None:
            return 3, first, second
        height, width = self.canvas(*extent)
        side = self.resize.tile
        return 1 + height * width // side**2, 3, side, side


class MediaSize(NamedTuple):
    """What all of a sample's pictures or clips take of one module."""

    tokens: int
    """In the sequence."""
    load: int
    """Tokens inside the encoder's layers."""
    pairs: int
    """Pairs of tokens inside the encoder that attend to each other, in a layer on average: those of one picture or
    clip."""


@dataclass(frozen=True)
class SampleOutline:
    """A sample as described by the index. One with a `bad_reason` has no members and no tokens."""

    number: int
    shard: int
    key: SampleKey
    texts: tuple[Member, ...]  # the record; several where `data.fields` names several
    members: dict[str, list[Member]]  # of the kinds that the run uses, in the order of the shard; see `pictures_of`
    tokens: dict[str, list[int]]  # module -> tokens in the sequence of each of its pictures or clips
    bad_reason: str | None
    beside: OtherMembers = NO_OTHER_MEMBERS
    fields: Fields = NO_FIELDS

    @property
    def pictures(self) -> tuple[Visual, ...]:
        """The pictures and videos, in the order of the shard."""
        return places_of(self.members.get("image", ()))

    @property
    def counts(self) -> dict[str, int]:
        """Pictures, videos and clips, of the kinds that the run uses."""
        found = {kind: len(members) for kind, members in self.members.items()}
        if "image" in found:
            pictures = self.pictures
            found["video"] = sum(one.frames > 0 for one in pictures)
            found["image"] = len(pictures) - found["video"]
        return found

    def input_sizes(self, media: Media) -> list[tuple[int, int]]:
        """`Media.size` of each of the module's pictures or clips."""
        return [media.size(*extent) for extent in self.extents(media)]

    def extents(self, media: Media) -> list[tuple[int, int]]:
        """`Media.extents` of the module's pictures or clips."""
        return media.extents([member.extent for member in self.members[media.kind]])

    def places(self, media: Media) -> list[Place]:
        """Tokens in the sequence, and their grid, of each of the module's pictures or clips."""
        grids = [media.grid(*extent) if media.grid else None for extent in self.extents(media)]
        return list(zip(self.tokens[media.module], grids, strict=True))

    def media_tokens(self, modules: Sequence[Media], placeholders: Mapping[str, int]) -> MediaTokens:
        """Placeholders and numbers of tokens of its media.

        Args:
            placeholders: ids by module.
        """
        return {
            kind: [
                [(placeholders[media.module], self.tokens[media.module][at]) for media in modules if media.kind == kind]
                for at in range(len(members))
            ]
            for kind, members in self.members.items()
        }

    def media_size(self, media: Media) -> MediaSize:
        """What all of the module's pictures or clips take."""
        tokens = inner = self.tokens[media.module]
        if media.inner_tokens:
            inner = [media.inner_tokens(*extent) for extent in self.extents(media)]
        pairs = [count**2 for count in inner]
        if media.pairs:
            pairs = [media.pairs(*extent) for extent in self.extents(media)]
        return MediaSize(sum(tokens), sum(inner), sum(pairs))


def count_tokens(
    members: dict[str, list[Member]], modules: Sequence[Media], sequence_length: int, bounds: Bounds = BOUNDS
) -> tuple[dict[str, list[int]], str | None]:
    """(`SampleOutline.tokens`, None), or (nothing, why the sample is bad): a member without a readable header, one that
    is above its bounds or that a module cannot take, or more tokens than `sequence_length`."""
    if above := bounds.of_placeholders(sum(map(len, members.values()))):
        return {}, above
    tokens: dict[str, list[int]] = {}
    for media in modules:
        tokens[media.module] = []
        extents = media.extents([member.extent for member in members[media.kind]])
        for member, extent in zip(members[media.kind], extents, strict=True):
            if 0 in member.extent:
                return {}, f"member .{shown(member.extension)} ({member.size} bytes) {_why_unreadable(member)}"
            if above := _above(member, bounds) or media.above(member.extent, extent, bounds):
                return {}, f"member .{shown(member.extension)}: {above}"
            try:
                media.size(*extent)
                tokens[media.module].append(media.num_tokens(*extent))
            except Exception as error:  # an EncoderError, or whatever a user's own encoder raises
                where = f"member .{shown(member.extension)} of {member.extent}"
                said = error if isinstance(error, ValueError) else reason_of(error)
                return {}, f"{where}: module {media.module} cannot take it: {said}"
    needed = sum(map(sum, tokens.values()))
    if needed > sequence_length:
        return {}, f"its media alone need {needed} tokens, but data.sequence_length is {sequence_length}"
    return tokens, None


def _above(member: Member, bounds: Bounds) -> str | None:
    if member.kind == "audio":
        return bounds.of_clip(*member.extent)
    above = bounds.of_video(member.size, member.milliseconds) if member.kind == "video" else None
    return above or bounds.of_picture(*member.extent)


_UNREADABLE = {"video": ", is cut off, or does not say how long it is", "audio": ", or is cut off"}


def _why_unreadable(member: Member) -> str:
    if member.extension.rpartition(".")[2] in UNREADABLE.get(member.kind, ()):
        readable = ", ".join(sorted(READABLE[member.kind]))
        return f"cannot be decoded: convert it, {member.kind} formats are {readable}"
    return f"has no readable {member.kind} header" + _UNREADABLE.get(member.kind, "")
