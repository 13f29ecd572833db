"""`mimo-train shards inspect CONFIG --html FILE`: samples of a run, as training reads them, to look at and to hear."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data.samples import Samples
    from mimo_train.report.data_page import DataSample

_MEASURED = 1000
"""Samples whose lengths are counted."""
_SHOWN = 20
_ANY = 10**12  # bad samples


def write(args: argparse.Namespace) -> int:
    """Write the page of the first samples of a run, in its order."""
    from data.shown import plural, shown
    from data.storage.replace import replacing
    from mimo_train.config.compose import load
    from mimo_train.config.fault import UserError
    from mimo_train.plan.inputs import build_dataset, tokenizer_of
    from mimo_train.report.data_page import DataPage, length_bins, render_data

    cfg = load(args.pattern, args.overrides)
    if cfg.data.stream:
        raise UserError(
            "data.stream: a page shows samples by number, which takes an index: give data.stream=false and shards that "
            "have one, or look at these by `mimo-train shards inspect PATTERN`"
        )
    data = replace(cfg.data, max_bad_samples=_ANY, cache_dir=args.cache_dir or cfg.data.cache_dir)
    tokenizer = tokenizer_of(cfg)
    dataset = build_dataset(replace(cfg, data=data), tokenizer)
    number = min(_SHOWN if args.samples is None else args.samples, len(dataset))
    samples = [_sample(dataset, at) for at in range(number)]
    lengths, learned, bad = [], [], 0
    for at in range(min(_MEASURED, len(dataset))):
        text, found = dataset.read_text(at)
        lengths.append(text.length)
        learned.append(int(text.loss_mask.sum()))
        bad += found is not None
    facts = [
        ("shards", f"{len(dataset.shards):,} with {plural(len(dataset), 'sample')}"),
        ("tokens", f"{_spread(lengths)}; with loss {_spread(learned)}, of the first {len(lengths):,} samples"),
        ("cut or full", f"{sum(one >= data.sequence_length for one in lengths):,} at {data.sequence_length} tokens"),
        ("bad", f"{bad:,}"),
    ]
    page = DataPage(shown(args.pattern), facts, length_bins(lengths), samples)
    with replacing(Path(args.html)) as file:
        file.write(render_data(page).encode(errors="replace"))
    print(f"{args.html}: {plural(number, 'sample')}, lengths of {len(lengths)}")
    return 0


def _sample(dataset: Samples, number: int) -> DataSample:
    from data.shown import shown
    from mimo_train.evaluation.shown_media import shown_media
    from mimo_train.report.data_page import DataSample, token_runs

    text, bad = dataset.read_text(number)
    media = shown_media(dataset, number)
    bad = bad or next((one for one in _of_media(dataset, number) if one is not None), None)
    ids = text.input_ids[: text.length].tolist()
    # A loss stands at the position before the token that it is of.
    learned = [False, *(bool(one) for one in text.loss_mask[: text.length - 1])]
    placeholders = {dataset.tokenizer.placeholder_id(item.placeholder) for item in dataset.modules}
    shard, key = dataset.locate(number)
    return DataSample(
        number,
        f"{shard.name}: {shown(key)}",
        media["images"],
        media["clips"],
        token_runs(ids, learned, placeholders, dataset.tokenizer.shown),
        text.length,
        int(text.loss_mask.sum()),
        "" if bad is None else shown(bad.reason),
    )


def _of_media(dataset: Samples, number: int) -> list[Any]:
    return [dataset.read_media(number, item.module)[1] for item in dataset.modules]


def _spread(numbers: list[int]) -> str:
    if not numbers:
        return "none"
    return f"{min(numbers):,} to {max(numbers):,}, {sum(numbers) / len(numbers):,.1f} on average"
