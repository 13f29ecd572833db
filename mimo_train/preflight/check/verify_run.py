"""`mimo-train shards verify CONFIG`: reads every sample as the run would: its limits, template, tokenizer, fields and
modules. Samples are read in several processes, each with its own dataset."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from data.errors import DataError
from data.order.sources import Source
from data.records.members import named_unread
from data.samples.bad_samples import allowed_of
from data.text_format import plural, shown
from data.workers import worker_processes
from mimo_train.config import compose
from mimo_train.config.errors import ConfigError
from mimo_train.config.schema import ConfigContainer
from mimo_train.inputs.datasets import (
    HeldOutSet,
    build_dataset,
    fields_of,
    held_out_sets,
    tokenizer_of,
    training_sources,
    without_split,
)
from mimo_train.layout.run import config_faults
from mimo_train.preflight.check.shards import special_sentence

if TYPE_CHECKING:
    from data.samples.protocol import Samples

_AT_ONCE = 64  # samples that a process takes at a time

_readers: dict[int, Samples] = {}
"""Datasets of a worker process, by the index of their set."""


@dataclass(frozen=True)
class _Set:
    key: str
    """Config key."""
    source: Source
    held_out: HeldOutSet | None = None
    """None: they are trained on."""


@dataclass
class _Counts:
    """Counts of what is wrong with some samples."""

    bad: list[str] = field(default_factory=list)
    """A line for each bad sample."""
    cut: int = 0
    """Samples whose text is cut by `data.sequence_length`."""
    without_loss: int = 0
    special: Counter[str] = field(default_factory=Counter)
    """Samples with a special token as plain text, by token; by "" those with any."""


def verify_run(config: str, overrides: Sequence[str], workers: int) -> int:
    """Read every sample of a run's shards, name the bad ones, and sum up.

    Returns:
        The exit code: 0 if at most `data.max_bad_samples` are bad.

    Raises:
        ConfigError: the config has faults.
    """
    cfg = compose.load(config, overrides, weights=False)
    if faults := config_faults(cfg):
        raise ConfigError(faults)
    code, samples, bad = 0, 0, 0
    with ExitStack() as stack:
        pool = None
        if workers > 1:
            pool = stack.enter_context(worker_processes(workers, _open, config, list(overrides)))
        else:
            _open(config, overrides)
        for number, item in enumerate(_sets_of(cfg)):
            try:
                with closing(_dataset_of(cfg, item)) as dataset:
                    num_bad = _verify_set(number, item, cfg, dataset, pool)
                    size, allowed = len(dataset), dataset.allowed_bad_samples
            except DataError as error:  # a shard that cannot be read, or tokens of another tokenizer
                code = 1
                print(f"bad shard: {shown(str(error))}")
                continue
            if item.held_out:
                code |= int(num_bad > allowed)
            else:
                samples, bad = samples + size, bad + num_bad
    return code | int(bad > allowed_of(cfg.data.max_bad_samples, samples))


def _sets_of(cfg: ConfigContainer) -> list[_Set]:
    """Return all sets. Samples that `data.validation_fraction` holds out are among the training samples."""
    trained = [_Set(source.key, source) for source in training_sources(cfg) if source.shards]
    return trained + [_Set(source.key, source.source, source) for source in held_out_sets(cfg) if not source.fraction]


def _dataset_of(cfg: ConfigContainer, item: _Set) -> Samples:
    plain = replace(cfg, data=replace(cfg.data, shuffle=False))
    return build_dataset(without_split(plain), tokenizer_of(cfg), held_out=item.held_out, shards=[item.source])


def _verify_set(
    number: int, item: _Set, cfg: ConfigContainer, dataset: Samples, pool: ProcessPoolExecutor | None
) -> int:
    """Print the bad samples of a set and its sum, and return the number of bad ones."""
    from data.indexed.dataset import TokenDataset
    from data.samples.shard_dataset import ShardDataset

    for file in dataset.files if isinstance(dataset, TokenDataset) else ():
        file.require_whole()
    key, read = item.key, fields_of(cfg, item.source).members
    jobs = [(number, range(start, min(start + _AT_ONCE, len(dataset)))) for start in range(0, len(dataset), _AT_ONCE)]
    bad, cut, without_loss, reasons, special = 0, 0, 0, Counter[str](), Counter[str]()
    for counts in pool.map(_read, jobs) if pool else map(_read, jobs):
        bad, cut, without_loss = bad + len(counts.bad), cut + counts.cut, without_loss + counts.without_loss
        special += counts.special
        for line in counts.bad:
            print(f"bad: {line}")
            # The reason without its numbers, so that equal reasons can be counted.
            reasons[re.sub(r"\d+([.,]\d+)*", "#", line.split(": ", 2)[-1])[:100]] += 1
    for sentence in named_unread(dataset.unread_members()) if isinstance(dataset, ShardDataset) else ():
        print(f"warning: {key}: {sentence}", file=sys.stderr)
    fields = f", data.fields {sorted(read)}" if read else ""
    allowed = f"data.max_bad_samples allows {dataset.allowed_bad_samples:,}"
    print(f"{key}: {plural(len(dataset), 'sample')}, {bad:,} bad, {allowed}{fields}")
    if not isinstance(dataset, TokenDataset):  # its samples are windows of equal length
        print(
            f"  {cut:,} fill data.sequence_length {cfg.data.sequence_length}, {without_loss:,} have no token with loss"
        )
    if count := special.pop("", 0):
        tokens = [token for token, _ in special.most_common()]
        print(f"  {count:,} {special_sentence(count, tokens)}, see data.special_tokens_in_text")
    for reason, count in reasons.most_common(8):
        print(f"  {count:,} x {reason}")
    return bad


def _open(config: str, overrides: Sequence[str]) -> None:
    cfg = compose.load(config, overrides, weights=False)
    for number, item in enumerate(_sets_of(cfg)):
        try:
            _readers[number] = _dataset_of(cfg, item)
        except DataError:
            _readers.pop(number, None)  # reported once, by the main process


def _read(job: tuple[int, range]) -> _Counts:
    dataset, counts = _readers[job[0]], _Counts()
    dataset.inspects = True
    for number in job[1]:
        sample, fault = dataset.read_text(number)
        for media in dataset.modules:
            fault = fault or dataset.read_media(number, media.module)[1]
        if fault is not None:
            counts.bad.append(f"{fault.shard}: key {shown(fault.key)}: {shown(fault.reason)}")
            continue
        counts.cut += max(answer.length for answer in sample.answers) >= dataset.sequence_length
        counts.without_loss += not sample.loss_mask.any()
        counts.special.update([*sample.special_text, ""] if sample.special_text else ())
    return counts
