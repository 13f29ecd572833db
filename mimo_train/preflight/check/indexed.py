"""The .bin and .idx files of a run: whether they are whole, and whether their tokens are those of the tokenizer."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from data.errors import DataError
from data.indexed.file import IndexedFile
from data.indexed.find import find_indexed
from data.order.sources import Source
from data.storage.reader import ShardReader
from data.text_format import plural
from mimo_train.config.errors import Fault
from mimo_train.config.schema import ConfigContainer
from mimo_train.inputs.inputs import HeldOutSet, build_dataset, without_split
from mimo_train.preflight.check.findings import Report, fault_of

SPREAD = 64
"""Samples that are read, evenly over all of them."""
ENDS = 100
"""Documents of a file whose last token is looked at."""


@dataclass
class IndexedSource:
    """What was found of a source."""

    samples: int = 0
    fingerprint: str | None = None
    """Of the files, if all can be read."""
    complete: bool = True
    """Whether they can."""
    first: Any = None
    """Its first sample in the order of the run, `data.pipeline.TextSample`."""


def look_at_indexed(
    report: Report,
    cfg: ConfigContainer,
    key: str,
    source: Source,
    held_out: HeldOutSet | None,
    tokenizer: Any | None,
    rows: list,
) -> IndexedSource:
    """Open the files of a source and read samples all over them.

    Args:
        held_out: the set that they are; None: they are trained on.
        tokenizer: None: no sample is read.

    Raises:
        DataError: the source names other files too.
    """
    paths, files = find_indexed(source.shards), []
    for path in paths:
        try:
            file = IndexedFile(path, cfg.data.read_retries)
            file.require_whole()
        except DataError as error:
            report.faults.append(Fault(key, str(error)))
        else:
            files.append(file)
    found = IndexedSource(complete=len(files) == len(paths))
    rows.append((key, str(source.shards), f"{len(files)} of {plural(len(paths), 'pair')} of .bin and .idx can be read"))
    if not files:
        return found
    tokens = sum(file.tokens for file in files)
    types = ", ".join(sorted({file.dtype.name for file in files}))
    rows.append(("", "documents", f"{sum(file.documents for file in files):,}, of {tokens:,} tokens ({types})"))
    if tokenizer is None or cfg.data.sequence_length < 1:
        return found
    _add_ends(report, key, files, tokenizer)
    try:
        readable = replace(source, shards=[file.index for file in files])
        dataset = build_dataset(without_split(cfg), tokenizer, held_out=held_out, shards=[readable])
    except DataError as error:
        report.faults.append(fault_of(error, key))
        return found
    found.samples = len(dataset)
    found.fingerprint = dataset.fingerprint if found.complete else None
    rows.append(("", "samples", f"{found.samples:,} of data.sequence_length {cfg.data.sequence_length}"))
    try:
        found.first, _ = dataset.read_text(0)
        for number in np.unique(np.linspace(0, found.samples - 1, SPREAD).astype(np.int64)).tolist():
            dataset.read_text(number)
    except DataError as error:
        report.faults.append(fault_of(error, key))
    finally:
        dataset.close()
    return found


def _add_ends(report: Report, key: str, files: list[IndexedFile], tokenizer: Any) -> None:
    """A warning where documents do not end with the token that the model is to end texts with."""
    without, seen, reader = 0, 0, ShardReader()
    for file in files:
        starts = file.starts(np.arange(min(ENDS, file.documents) + 1))
        for end in starts[1:][np.diff(starts) > 0].tolist():
            (last,) = file.read(reader, end - 1, 1)
            seen, without = seen + 1, without + (last != tokenizer.end_of_turn_id)
    reader.close()
    if without:
        end = tokenizer.end_of_turn_id
        report.warnings.append(
            f"{key}: {without} of {plural(seen, 'document')} do not end with {tokenizer.shown([end])} (id {end}), the "
            "tokenizer's end of a text: a model does not learn where texts end; `preprocess_data.py --append-eod` "
            "writes it"
        )
