"""A page about the samples of a run, as training reads them: pictures, sounds, text with what is learned in colour, and
how long they are. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from mimo_train.report.render import render

_BINS = 24


@dataclass(frozen=True)
class TokenRun:
    """Tokens one after the other of which the same is so."""

    text: str
    kind: str
    """"learned", "given" (without loss), "medium" (a placeholder)."""
    tokens: int


@dataclass(frozen=True)
class DataSample:
    """One sample.

    Attributes:
        place: shard and key.
        pictures: PNG in base64; clips: WAV in base64.
        fault: why it is bad; empty if it is not.
    """

    number: int
    place: str
    pictures: Sequence[str]
    clips: Sequence[str]
    runs: Sequence[TokenRun]
    tokens: int
    learned: int
    fault: str = ""


@dataclass(frozen=True)
class Bin:
    """Samples of `low` to `high` tokens, both included; `share`: of the fullest bin, in percent."""

    low: int
    high: int
    samples: int
    share: float


@dataclass(frozen=True)
class DataPage:
    """What templates/data.html.j2 reads."""

    title: str
    facts: Sequence[tuple[str, str]]
    bins: Sequence[Bin]
    samples: Sequence[DataSample]


def token_runs(
    ids: Sequence[int], learned: Sequence[bool], media: Collection[int], shown: Callable[[Iterable[int]], str]
) -> list[TokenRun]:
    """The tokens of a sample in runs.

    Args:
        learned: of each, whether it has a loss.
        media: ids of placeholders.
        shown: text of ids for people.
    """

    def kind(at: int) -> tuple[str, int]:
        if ids[at] in media:
            return "medium", ids[at]
        return ("learned" if learned[at] else "given"), -1

    runs = []
    for (name, _), group in groupby(range(len(ids)), key=kind):
        own = [ids[at] for at in group]
        text = shown(own[:1]) if name == "medium" else shown(own)
        runs.append(TokenRun(text, name, len(own)))
    return runs


def length_bins(lengths: Sequence[int]) -> list[Bin]:
    """A histogram of lengths, in bins of equal width."""
    if not lengths:
        return []
    low, high = min(lengths), max(lengths)
    width = -(-(high - low + 1) // _BINS)
    counts = [0] * -(-(high - low + 1) // width)
    for length in lengths:
        counts[(length - low) // width] += 1
    return [
        Bin(low + at * width, low + (at + 1) * width - 1, count, 100 * count / max(counts))
        for at, count in enumerate(counts)
    ]


def render_data(page: DataPage) -> str:
    """The page as HTML."""
    return render(page, "data.html.j2", ("style.css", "data.css"))
