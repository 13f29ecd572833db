"""Placeholders: tokens that image or audio features replace, and their positions.

A record's `<image>` becomes `start`, one `pad` for each feature, and `end`; `samples.media_spec` has the number of
features. A chat template that knows media writes a `mark` there: the pad or another token, perhaps between start and
end.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from data.errors import DataError
from data.records.conversation import MARKERS

NOUNS = {"image": "an image", "video": "a video", "audio": "audio"}


class ItemText(NamedTuple):
    """The text of an image or audio item."""

    start: str
    """Plain text in front of `tokens`. Text next to it may join it."""
    tokens: Sequence[int]
    """Tokens that features replace, and separators around and between them."""
    end: str
    """Plain text behind `tokens`."""


@dataclass(frozen=True)
class Placeholder:
    """The tokens that an encoder's features replace, and the text around them. `resolve` fills empty texts."""

    name: str
    """Name of the module's placeholder, such as `<image>`, or `<image:details>` for a second module of the kind."""
    kind: str = ""
    """The kind, "image", "video" or "audio". Empty: derived from a name such as `<image>`."""
    pad: str = ""
    """Special token that is repeated; added to the vocabulary if missing."""
    start: str = ""
    """Text before the pads, special tokens included."""
    end: str = ""
    mark: str = ""
    """Token of the chat template, if not the pad. Only the first module of a kind has one; the others follow it."""

    @property
    def text(self) -> str:
        """The full text with one pad."""
        return self.start + self.pad + self.end


_FAMILIES = {
    "image": (
        ("", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),  # Qwen2-VL to Qwen3-VL
        ("<start_of_image>", "\n\n<start_of_image>", "<image_soft_token>", "<end_of_image>\n\n"),  # Gemma 3
        ("", "", "<image>", ""),  # LLaVA
    ),
    "audio": (
        ("", "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),  # Qwen2-Audio, Qwen2.5-Omni
        ("", "<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"),  # Qwen3-Omni
        ("", "", "<audio>", ""),
    ),
}
"""kind -> (mark if not the pad, start, pad, end) of these families' processors."""


def as_placeholders(items: Iterable[str | Placeholder]) -> list[Placeholder]:
    """Return the placeholder of each module. A string is its name. Raises DataError if two are equal."""
    placeholders = [Placeholder(item) if isinstance(item, str) else item for item in items]
    placeholders = [item if item.kind else replace(item, kind=MARKERS.get(item.name, "")) for item in placeholders]
    _require_different([item.name for item in placeholders])
    return placeholders


def _require_different(names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        raise DataError(f"each media module needs its own placeholder, got {[*names]}")


def resolve(placeholders: Sequence[Placeholder], written: Callable[[str], str | None]) -> list[Placeholder]:
    """Fill empty texts: as in the chat template's family, or the name. Videos that the template does not write are left
    out.

    Args:
        written: kind -> the chat template's text for such a part; None if it does not know the kind.

    Raises:
        DataError: the template writes an unknown text, or two modules share a pad.
    """
    resolved: list[Placeholder] = []
    for item in placeholders:
        if item.kind == "video" and item.pad not in (written("video") or ("" if written("image") else item.pad)):
            continue
        if item.kind not in [other.kind for other in resolved if other.kind]:
            resolved.append(_resolve_first(item, written(item.kind) if item.kind else None))
        elif item.mark:
            raise DataError(
                f"{item.name}: the chat template writes one mark for {NOUNS[item.kind]}, and an earlier module has "
                f"it: remove the mark {item.mark!r}"
            )
        else:
            resolved.append(replace(item, pad=item.pad or item.name))
    _require_different([item.pad for item in resolved])
    return resolved


def _resolve_first(item: Placeholder, written: str | None) -> Placeholder:
    if written is None and item.mark:
        raise DataError(
            f"data.chat_template: nothing writes {item.mark!r} for {NOUNS.get(item.kind, 'media')}. Use the tokenizer "
            "and chat template of the model's directory, or remove the module's placeholder.mark"
        )
    if not item.pad and written is not None:
        for mark, start, pad, end in _FAMILIES[item.kind]:
            if (item.mark or mark or pad) in written and (mark or pad) in written:
                item = replace(item, pad=pad, mark=mark, start=item.start or start, end=item.end or end)
                break
    item = replace(item, pad=item.pad or item.name)
    item = replace(item, mark=item.mark or item.pad)
    if written is not None and item.mark not in written:
        raise DataError(
            f"data.chat_template: the template writes {written!r} for {NOUNS[item.kind]}, without {item.mark!r}. Set "
            "the module's placeholder.mark to the token that it writes, and placeholder.pad to the one that is repeated"
        )
    return item


def place_texts(placeholders: Sequence[Placeholder]) -> dict[str, str]:
    """Return kind -> text of an image or audio, with one pad for each module that takes it."""
    texts: dict[str, str] = {}
    for item in placeholders:
        if item.kind:
            texts[item.kind] = texts.get(item.kind, "") + item.text
    return texts


class Places:
    """Positions of media in the text of a chat template."""

    def __init__(self, placeholders: Sequence[Placeholder]) -> None:
        self._placeholders = placeholders
        self._texts = place_texts(placeholders)
        self._marked = {}
        for kind, text in self._texts.items():
            item = next(item for item in placeholders if item.kind == kind)
            # Include text that the template may have written around the mark, so that it is not doubled.
            forms = {text} | {start + item.mark + end for start in ("", item.start) for end in ("", item.end)}
            # Literals, longest first: `re` finds these faster than optional groups.
            self._marked[kind] = re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True))))

    def write(self, text: str) -> str:
        """Replace each mark by the family's text, with one pad for each module."""
        for kind, pattern in self._marked.items():
            text = pattern.sub(self._texts[kind].replace("\\", r"\\"), text)
        return text

    def find(self, text: str) -> list[tuple[str, int, int]]:
        """Return (kind, first character, end) of each media text in the output of `write`."""
        matches_of_kind = ((kind, re.finditer(re.escape(place), text)) for kind, place in self._texts.items())
        places = [(kind, *match.span()) for kind, matches in matches_of_kind for match in matches]
        return sorted(places, key=lambda place: place[1])

    def insert(
        self, text: str, places: Sequence[tuple[str, int, int]], items: Sequence[Sequence[ItemText]]
    ) -> tuple[str, Callable[[int], int]]:
        """Write the plain text of each place's items, one for each module, around its pads. Return the new text, and a
        function from the index of a character outside of places to its new index."""
        written, ends, end = "", [0], 0
        for (kind, first, last), of_modules in zip(places, items, strict=True):
            forms = [item.text for item in self._placeholders if item.kind == kind]
            pairs = zip(forms, of_modules, strict=True)
            written += text[end:first] + "".join(item.start + form + item.end for form, item in pairs)
            end = last
            ends.append(len(written))
        lasts = [0, *(last for _, _, last in places)]

        def moved(character: int) -> int:
            place = bisect_right(lasts, character) - 1
            return ends[place] + character - lasts[place]

        return written + text[end:], moved


Grid = tuple[int, int] | tuple[int, int, int, float] | tuple[int, int, int, float, int, int]
"""Rows and columns of an image's tokens, row by row; of a video also the number of its times, and the positions between
two of them; with sound also the number of tokens of sound between its own, and the position that the start and the end
of the sound take: 1, or 0 if they share that of the token in front and behind."""

Place = tuple[int, "Grid | None"]
"""Number of tokens of an image or audio, and their grid; None: positions as for text."""


def blocks_of(ids: np.ndarray, placeholders: Sequence[int]) -> np.ndarray:
    """Return the number of the run of placeholders that each token is in, int64 [S]; -1 for other tokens."""
    inside = np.isin(ids, placeholders)
    begins = inside & ~np.concatenate([[False], inside[:-1]])
    return np.where(inside, np.cumsum(begins) - 1, -1)


def axis_positions(ids: np.ndarray, media: Mapping[int, Sequence[Place]]) -> np.ndarray:
    """Return M-RoPE positions in time, row and column, int64 [3, S] (Wang et al. 2024, arXiv 2409.12191, section 2.1).

    A text token has one position on all axes: the largest one before it plus 1. An image's tokens have that position in
    time; the other axes add row and column. Times of a video add multiples of an interval, rounded down. Tokens of its
    sound count from its first position on all axes, and text behind it from its last token alone, as in
    `get_rope_index` of Qwen-Omni in transformers 5.23. Padding counts as text.

    Args:
        ids: int64 [S].
        media: placeholder id -> its images or audio items, in order.
    """
    spans = []
    for placeholder, places in media.items():
        pads, at = np.flatnonzero(ids == placeholder), 0
        assert len(pads) == sum(tokens for tokens, _ in places), (placeholder, len(pads), places)
        for tokens, grid in places:
            if grid is not None and tokens:
                spans.append((int(pads[at]), placeholder, (*grid, *(1, 0.0, 0, 1)[len(grid) - 2 :])))
            at += tokens
    positions = np.empty((3, len(ids)), dtype=np.int64)
    at = following = 0
    for first, placeholder, (rows, columns, times, interval, sound, marks) in sorted(spans):
        positions[:, at:first] = following + np.arange(first - at)
        following += first - at
        if not marks:  # the start of the sound is in front
            following -= 1
            positions[:, first - 1] = following - 1
        at = first + times * rows * columns + sound
        is_frame = ids[first:at] == placeholder
        of_times = (np.arange(times, dtype=np.float32) * np.float32(interval)).astype(np.int64)
        of_item = np.empty((3, at - first), dtype=np.int64)
        of_item[0, is_frame] = np.repeat(of_times, rows * columns)
        of_item[1, is_frame] = np.tile(np.repeat(np.arange(rows), columns), times)
        of_item[2, is_frame] = np.tile(np.arange(columns), times * rows)
        of_item[:, ~is_frame] = np.arange(sound)
        positions[:, first:at] = following + of_item
        following += max(rows, columns, int(of_times[-1]) + 1) if is_frame[-1] else sound
        if not marks:
            positions[:, at] = following
            at += 1
    positions[:, at:] = following + np.arange(len(ids) - at)
    return positions
