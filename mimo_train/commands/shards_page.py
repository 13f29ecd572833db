"""`mimo-train shards inspect CONFIG --html FILE`: samples of a run, as training reads them, to look at and to hear."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

_MEASURED = 1000
"""Samples whose lengths are counted."""
_SHOWN = 20


def write(args: argparse.Namespace) -> int:
    """Write the page of the first samples of a run, in its order."""
    from data.storage.files import replacing
    from data.text_format import plural, shown
    from mimo_train.config.compose import load
    from mimo_train.dataset import open_dataset
    from mimo_train.logging.report.data_page import DataPage, length_bins, render_data

    cfg = load(args.pattern, args.overrides)
    cache_dir = args.cache_dir or cfg.data.cache_dir
    dataset = open_dataset(replace(cfg, data=replace(cfg.data, cache_dir=cache_dir)))
    number = min(_SHOWN if args.samples is None else args.samples, len(dataset))
    samples = [dataset.decode(dataset[at]) for at in range(number)]
    lengths, learned, bad = [], [], 0
    for at in range(min(_MEASURED, len(dataset))):
        text, bad_text = dataset.samples.read_text(at)
        lengths.append(text.length)
        learned.append(int((text.loss_mask > 0).sum()))
        bad += bad_text is not None
    full = sum(length >= cfg.data.sequence_length for length in lengths)
    facts = [
        ("shards", f"{len(dataset.samples.shards):,} with {plural(len(dataset), 'sample')}"),
        ("tokens", f"{_spread(lengths)}; with loss {_spread(learned)}, of the first {len(lengths):,} samples"),
        ("cut or full", f"{full:,} at {cfg.data.sequence_length} tokens"),
        ("bad", f"{bad:,}"),
    ]
    page = DataPage(shown(args.pattern), facts, length_bins(lengths), samples)
    with replacing(Path(args.html)) as file:
        file.write(render_data(page).encode(errors="replace"))
    print(f"{args.html}: {plural(number, 'sample')}, lengths of {len(lengths)}")
    return 0


def _spread(numbers: list[int]) -> str:
    if not numbers:
        return "none"
    return f"{min(numbers):,} to {max(numbers):,}, {sum(numbers) / len(numbers):,.1f} on average"
