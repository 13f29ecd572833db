"""Remarks on texts that are not trained as they are written."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mimo_train.preflight.check.findings import Report

if TYPE_CHECKING:
    from data.pipeline import TextSample
    from data.text.templates import Template

_NAMED = 6  # special tokens in a message


def special_sentence(count: int, tokens: Sequence[str]) -> str:
    """Return what follows the words "N samples"."""
    named = " ".join(tokens[:_NAMED]) + (" ..." if len(tokens) > _NAMED else "")
    has = "has" if count == 1 else "have"
    return f"{has} special tokens of the tokenizer as plain text ({named})"


def add_text_remarks(report: Report, samples: str, texts: Sequence["TextSample"], template: "Template") -> None:
    """Warn of special tokens that are read as plain text. Note line breaks that a directory's template does not get.

    Args:
        samples: with a place for their number.
        texts: of samples that were inspected, see `data.samples.Samples.inspects`.
    """
    special = [text.special_text for text in texts if text.special_text]
    if special:
        tokens = sorted(frozenset.union(*special))
        report.warnings.append(
            f"{samples.format(len(special))} {special_sentence(len(special), tokens)}. To read them as tokens, set "
            "data.special_tokens_in_text"
        )
    separated = sum(text.has_separators for text in texts)
    if separated and not template.is_own:
        report.notes.append(
            f"{samples.format(separated)} have a line break next to a marker. It is left out: the chat template "
            "decides what is between media and text, as for messages of clients (docs/data.md#records)"
        )
