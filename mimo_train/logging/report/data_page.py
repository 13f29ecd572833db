"""A page about the samples of a run, as training reads them: images, sounds, text with what is learned in colour, and
how long they are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from mimo_train.logging.report.page import render

_BINS = 24


@dataclass(frozen=True)
class TokenRun:
    """Tokens one after the other of which the same is so."""

    text: str
    kind: str
    """"learned", "given" (without loss), "medium" (a placeholder)."""
    tokens: int


@dataclass(frozen=True)
class DecodedSample:
    """One sample as people read it; a notebook shows it with its images, audio and colours.

    Attributes:
        place: shard and key.
        images: PNG files in base64.
        audio: WAV files in base64.
        learned: tokens with loss.
        bad: why the sample cannot be read; empty if it can.
    """

    number: int
    place: str
    images: Sequence[str]
    audio: Sequence[str]
    runs: Sequence[TokenRun]
    tokens: int
    learned: int
    bad: str = ""

    def __str__(self) -> str:
        """The text, with learned tokens in [[double brackets]] and the placeholders of media with their number."""
        forms = {"learned": "[[{0.text}]]", "given": "{0.text}", "medium": "{0.text} x {0.tokens} "}
        text = "".join(forms[run.kind].format(run) for run in self.runs)
        return f"{text}\nBad: {self.bad}" if self.bad else text

    def __repr__(self) -> str:
        return f"sample {self.number} ({self.place}), {self.tokens} tokens, {self.learned} learned:\n{self}"

    def _repr_html_(self) -> str:
        return render(self, "notebook.html.j2", ())


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
    samples: Sequence[DecodedSample]


def token_runs(
    ids: Sequence[int], learned: Sequence[bool], media: Collection[int], shown: Callable[[Iterable[int]], str]
) -> list[TokenRun]:
    """Return the tokens of a sample in runs.

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
    text_ids: list[int] = []
    for (name, _), group in groupby(range(len(ids)), key=kind):
        run = [ids[at] for at in group]
        if name == "medium":
            text_ids, text = [], shown(run[:1])
        else:
            # A tokenizer may drop the space before the first word of what it decodes.
            before, text_ids = shown(text_ids), text_ids + run
            whole = shown(text_ids)
            text = whole.removeprefix(before) if whole.startswith(before) else shown(run)
        runs.append(TokenRun(text, name, len(run)))
    return runs


def length_bins(lengths: Sequence[int]) -> list[Bin]:
    """Return a histogram of lengths, in bins of equal width."""
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
    """Return the page as HTML."""
    return render(page, "data.html.j2", ("style.css", "data.css"))
