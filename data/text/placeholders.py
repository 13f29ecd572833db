"""Placeholders: the tokens that hold the place of a picture's or clip's features, as the model's family writes them.

In a record's text a place is marked with `<image>` or `<audio>`. In the sequence it is `start`, then `pad` as often as
the medium takes tokens, then `end`; the features replace the embeddings of the pads alone. A chat template that knows
media writes a `mark` at the place, which is the pad or another token, perhaps with start and end around it already.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from data.errors import DataError
from data.records.conversation import MARKERS

WORDS = {"image": "a picture", "audio": "a clip"}


@dataclass(frozen=True)
class Placeholder:
    """What one encoder module's features stand behind. Empty texts are filled by `resolved`."""

    name: str
    """The module's own, such as `<image>`; of a second module of the kind `<image:details>`."""
    kind: str = ""
    """"image" or "audio"; of the name where it is a record's marker."""
    pad: str = ""
    """Special token that is repeated; added to the vocabulary if it is not there."""
    start: str = ""
    """Text before the pads, special tokens included."""
    end: str = ""
    """Text behind them."""
    mark: str = ""
    """Token that the chat template writes at the place, where it is not the pad. Only the first module of a kind has
    one: further ones follow it."""

    @property
    def text(self) -> str:
        """The place with one pad."""
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
"""kind -> (mark if it is not the pad, start, pad, end) as the processors of these families write them."""


def as_placeholders(given: Iterable[str | Placeholder]) -> list[Placeholder]:
    """One for each module; of a bare name nothing else is given.

    Raises:
        DataError: two are the same.
    """
    found = [Placeholder(item) if isinstance(item, str) else item for item in given]
    found = [item if item.kind else replace(item, kind=MARKERS.get(item.name, "")) for item in found]
    names = [item.name for item in found]
    if len(set(names)) < len(names):
        raise DataError(f"each media module needs its own placeholder, got {names}")
    return found


def resolved(placeholders: Sequence[Placeholder], written: Callable[[str], str | None]) -> list[Placeholder]:
    """The placeholders with every text that was left open: as the chat template's family has it, else the name.

    Args:
        written: kind -> what the chat template writes for such a part of a message; None if it knows no such parts.

    Raises:
        DataError: the template writes something that is in no table and was not given, or two modules share a pad.
    """
    found: list[Placeholder] = []
    for item in placeholders:
        if any(item.kind and item.kind == other.kind for other in found):
            if item.mark:
                raise DataError(
                    f"{item.name}: the chat template writes one mark for {WORDS[item.kind]}, and an earlier module has "
                    f"it: remove the mark {item.mark!r}"
                )
            found.append(replace(item, pad=item.pad or item.name))
        else:
            found.append(_of_family(item, written(item.kind) if item.kind else None))
    pads = [item.pad for item in found]
    if len(set(pads)) < len(pads):
        raise DataError(f"each media module needs its own placeholder, got {pads}")
    return found


def _of_family(item: Placeholder, written: str | None) -> Placeholder:
    if not item.pad and written is not None:
        for mark, start, pad, end in _FAMILIES[item.kind]:
            if (item.mark or mark or pad) in written and (mark or pad) in written:
                item = replace(item, pad=pad, mark=mark, start=item.start or start, end=item.end or end)
                break
    if written is None and item.mark:
        raise DataError(
            f"data.chat_template: nothing writes {item.mark!r} for {WORDS.get(item.kind, 'a medium')}: remove the "
            "module's placeholder.mark"
        )
    item = replace(item, pad=item.pad or item.name)
    item = replace(item, mark=item.mark or item.pad)
    if written is not None and item.mark not in written:
        raise DataError(
            f"data.chat_template: the template writes {written!r} for {WORDS[item.kind]}, in which there is no "
            f"{item.mark!r}: set the module's placeholder.mark to the token that it writes, and placeholder.pad to the "
            "one that is repeated"
        )
    return item


def place_texts(placeholders: Sequence[Placeholder]) -> dict[str, str]:
    """Return the text at the place of a medium, with one pad of each module that takes it, by kind."""
    texts: dict[str, str] = {}
    for item in placeholders:
        if item.kind:
            texts[item.kind] = texts.get(item.kind, "") + item.text
    return texts


class Places:
    """Finds the places that a chat template has marked, and writes them out."""

    def __init__(self, placeholders: Sequence[Placeholder]) -> None:
        self._texts = place_texts(placeholders)
        patterns = []
        for kind in self._texts:
            own = [item for item in placeholders if item.kind == kind]
            first = own[0]
            # Start and end that the template has written are taken with the mark, so that they are not doubled; and so
            # is a place that it has written whole, for all modules.
            around = [f"(?:{re.escape(text)})?" if text else "" for text in (first.start, first.end)]
            whole = re.escape(self._texts[kind]) + "|" if len(own) > 1 else ""
            patterns.append(f"(?P<{kind}>{whole}{around[0]}{re.escape(first.mark)}{around[1]})")
        self._pattern = re.compile("|".join(patterns)) if patterns else None

    def find(self, text: str) -> list[tuple[str, int, int]]:
        """(kind, first character, behind the last) of every place."""
        if self._pattern is None:
            return []
        return [(match.lastgroup or "", *match.span()) for match in self._pattern.finditer(text)]

    def written_out(self, text: str, found: Sequence[tuple[str, int, int]]) -> tuple[str, list[tuple[int, int, int]]]:
        """(the text with every place as the family has it, for each place its first character and behind its last, and
        by how much everything behind it has moved)."""
        pieces, at, length, places = [], 0, 0, []
        for kind, first, end in found:
            pieces += [text[at:first], self._texts[kind]]
            begin = length + first - at
            length, at = begin + len(self._texts[kind]), end
            places.append((begin, length, length - end))
        return "".join([*pieces, text[at:]]), places


Grid = tuple[int, int]
"""Rows and columns of the tokens that a picture takes in the sequence, which are in the order of its rows."""

Place = tuple[int, "Grid | None"]
"""Tokens of a picture or clip, and their grid; without one they are counted like text."""


def axis_positions(ids: np.ndarray, media: Mapping[int, Sequence[Place]]) -> np.ndarray:
    """Positions in time, row and column, int64 [3, S].

    A token of text has the same on all axes, one more than the largest before it. The tokens of a picture have that as
    their time, and add their row and column to it on the other axes. Padding is counted on like text.

    Args:
        ids: int64 [S].
        media: placeholder's id -> the pictures or clips whose tokens have it, in their order.
    """
    spans = []
    for placeholder, found in media.items():
        places, at = np.flatnonzero(ids == placeholder), 0
        assert len(places) == sum(tokens for tokens, _ in found), (placeholder, len(places), found)
        for tokens, grid in found:
            if grid is not None and tokens:
                spans.append((int(places[at]), grid))
            at += tokens
    positions = np.empty((3, len(ids)), dtype=np.int64)
    at = following = 0
    for first, (rows, columns) in sorted(spans):
        positions[:, at:first] = following + np.arange(first - at)
        following += first - at
        at = first + rows * columns
        positions[0, first:at] = following
        positions[1, first:at] = following + np.repeat(np.arange(rows), columns)
        positions[2, first:at] = following + np.tile(np.arange(columns), rows)
        following += max(rows, columns)
    positions[:, at:] = following + np.arange(len(ids) - at)
    return positions
