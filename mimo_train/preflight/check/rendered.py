"""One sample as the model sees it, for a report."""

from itertools import groupby
from typing import Any

SHOWN_CHARACTERS = 400
"""Of a sample."""


def add_rendered(text: Any, tokenizer: Any, of: str, rows: list) -> None:
    """One sample as the model sees it, and what of it is learned."""
    shown = ""
    runs = groupby(text.input_ids[: text.length].tolist(), key=lambda token: (tokenizer.as_text(token) != token, token))
    for is_media, group in groupby(runs, key=lambda run: run[0][0]):
        members = [list(run) for _, run in group]
        if is_media:
            shown += "".join(f"{tokenizer.shown(run[:1])} x {len(run)} " for run in members)
        else:
            shown += tokenizer.shown([token for run in members for token in run])
    learned = tokenizer.shown(text.labels[text.loss_mask > 0].tolist())
    rows.append((of, "rendered", _cut(shown)))
    rows.append((of, "learned", _cut(learned)))


def _cut(text: str) -> str:
    """On one line, and not too much."""
    line = text.replace("\n", "\\n")
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[:SHOWN_CHARACTERS]} ..."
