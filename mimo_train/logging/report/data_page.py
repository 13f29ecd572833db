"""A page of a run's samples as training reads them: images, audio, coloured text, and lengths."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from mimo_train.logging.report.page import render

_BINS = 24


@dataclass(frozen=True)
class TokenRun:
    """Consecutive tokens of one kind."""

    text: str
    kind: str
    """"learned" (with loss), "given" (without), or "medium" (a placeholder)."""
    tokens: int


@dataclass(frozen=True)
class DecodedSample:
    """One decoded sample; a notebook shows it with images, audio and colours.

    Attributes:
        place: shard and key.
        images: PNG files in base64.
        audio: WAV files in base64.
        learned: number of tokens with loss.
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
        """Return the text, with learned tokens in [[double brackets]] and placeholders with their count."""
        forms = {"learned": "[[{0.text}]]", "given": "{0.text}", "medium": "{0.text} x {0.tokens} "}
        text = "".join(forms[run.kind].format(run) for run in self.runs)
        return f"{text}\nBad: {self.bad}" if self.bad else text

    def __repr__(self) -> str:
        return f"sample {self.number} ({self.place}), {self.tokens} tokens, {self.learned} learned:\n{self}"

    def _repr_html_(self) -> str:
        return render(vars(self), "notebook.html.j2", ())


def token_runs(
    ids: Sequence[int], learned: Sequence[bool], media: Collection[int], shown: Callable[[Iterable[int]], str]
) -> list[TokenRun]:
    """Return the tokens of a sample in runs.

    Args:
        learned: True for each token with loss.
        media: ids of placeholders.
        shown: returns ids as readable text.
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
            # A tokenizer may drop the space before the first word that it decodes.
            before, text_ids = shown(text_ids), text_ids + run
            whole = shown(text_ids)
            text = whole.removeprefix(before) if whole.startswith(before) else shown(run)
        runs.append(TokenRun(text, name, len(run)))
    return runs


def length_bins(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return a histogram of lengths in bins of equal width: (least, most, number of samples)."""
    if not lengths:
        return []
    low, high = min(lengths), max(lengths)
    width = math.ceil((high - low + 1) / _BINS)
    counts = Counter((length - low) // width for length in lengths)
    return [(start, start + width - 1, counts[at]) for at, start in enumerate(range(low, high + 1, width))]


def render_data(
    title: str, facts: Sequence[tuple[str, str]], lengths: Sequence[int], samples: Sequence[DecodedSample]
) -> str:
    """Return the page as HTML; `lengths` are tokens of samples for the histogram."""
    page = {"title": title, "facts": facts, "bins": length_bins(lengths), "samples": samples}
    return render(page, "data.html.j2", ("style.css", "data.css"))
