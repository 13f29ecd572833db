"""`mimo-train shards verify CONFIG`: reads every sample as the run would: its limits, template, tokenizer, fields and
modules. Samples are read in several processes, each with its own dataset."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class _Found:
    samples: int
    bad: list[str]
    """A line for each bad sample."""
    cut: int
    """Samples whose text is cut by `data.sequence_length`."""
    silent: int
    """Samples without any token with loss."""
    special: Counter[str]
    """Samples with a special token as plain text, by token; by "" those with any."""


@dataclass(frozen=True)
class _Verified:
    samples: int
    bad: int


def verify_run(config: str, overrides: Sequence[str], workers: int) -> int:
    """Read every sample of a run's shards, name the bad ones, and sum up.

    Returns:
        The exit code: 0 if at most `data.max_bad_samples` are bad.

    Raises:
        ConfigError: the config has faults.
    """
    cfg = compose.load(config, overrides)
    if faults := config_faults(cfg):
        raise ConfigError(faults)
    code, samples, bad = 0, 0, 0
    with ExitStack() as stack:
        pool = None
        if workers > 1:
            pool = stack.enter_context(worker_processes(workers, _open, config, list(overrides)))
        else:
            _open(config, overrides)
        for number, one in enumerate(_sets_of(cfg)):
            try:
                with closing(_dataset_of(cfg, one)) as dataset:
                    verified = _verify_set(number, one, cfg, dataset, pool)
            except DataError as error:  # a shard that cannot be read, or tokens of another tokenizer
                code = 1
                print(f"bad shard: {shown(str(error))}")
                continue
            if one.held_out:
                code |= int(verified.bad > dataset.allowed_bad_samples)
            else:
                samples, bad = samples + verified.samples, bad + verified.bad
    return code | int(bad > allowed_of(cfg.data.max_bad_samples, samples))


def _sets_of(cfg: ConfigContainer) -> list[_Set]:
    """Return all sets. Samples that `data.validation_fraction` holds out are among the training samples."""
    trained = [_Set(one.key, one) for one in training_sources(cfg) if one.shards]
    return trained + [_Set(one.key, one.source, one) for one in held_out_sets(cfg) if not one.fraction]


def _dataset_of(cfg: ConfigContainer, one: _Set) -> Samples:
    plain = replace(cfg, data=replace(cfg.data, shuffle=False))
    return build_dataset(without_split(plain), tokenizer_of(cfg), held_out=one.held_out, shards=[one.source])


def _verify_set(
    number: int, one: _Set, cfg: ConfigContainer, dataset: Samples, pool: ProcessPoolExecutor | None
) -> _Verified:
    from data.indexed.dataset import TokenDataset
    from data.samples.shard_dataset import ShardDataset

    for file in dataset.files if isinstance(dataset, TokenDataset) else ():
        file.require_whole()
    key, read = one.key, fields_of(cfg, one.source).members
    allowed = dataset.allowed_bad_samples
    jobs = [(number, at, min(at + _AT_ONCE, len(dataset))) for at in range(0, len(dataset), _AT_ONCE)]
    results = pool.map(_read, jobs) if pool else map(_read, jobs)
    size, bad, cut, silent, reasons, special = 0, 0, 0, 0, Counter[str](), Counter[str]()
    for result in results:
        size, bad, cut, silent = size + result.samples, bad + len(result.bad), cut + result.cut, silent + result.silent
        special += result.special
        for line in result.bad:
            print(f"bad: {line}")
            reasons[_kind_of(line)] += 1
    for sentence in named_unread(dataset.unread_members()) if isinstance(dataset, ShardDataset) else ():
        print(f"warning: {key}: {sentence}", file=sys.stderr)
    fields = f", data.fields {sorted(read)}" if read else ""
    print(f"{key}: {plural(size, 'sample')}, {bad:,} bad, data.max_bad_samples allows {allowed:,}{fields}")
    if not isinstance(dataset, TokenDataset):  # its samples are windows of equal length
        print(f"  {cut:,} fill data.sequence_length {cfg.data.sequence_length}, {silent:,} have no token with loss")
    if count := special.pop("", 0):
        tokens = [token for token, _ in special.most_common()]
        print(f"  {count:,} {special_sentence(count, tokens)}, see data.special_tokens_in_text")
    for reason, count in reasons.most_common(8):
        print(f"  {count:,} x {reason}")
    return _Verified(size, bad)


def _open(config: str, overrides: Sequence[str]) -> None:
    cfg = compose.load(config, overrides)
    for number, one in enumerate(_sets_of(cfg)):
        try:
            _readers[number] = _dataset_of(cfg, one)
        except DataError:
            _readers.pop(number, None)  # reported once, by the main process


def _read(job: tuple[int, int, int]) -> _Found:
    number, first, end = job
    return _found(_readers[number], range(first, end))


def _found(dataset: Samples, numbers: Sequence[int]) -> _Found:
    bad, cut, silent, special = list[str](), 0, 0, Counter[str]()
    dataset.inspects = True
    for at in numbers:
        sample, wrong = dataset.read_text(at)
        for media in dataset.modules:
            wrong = wrong or dataset.read_media(at, media.module)[1]
        if wrong is not None:
            bad.append(f"{wrong.shard}: key {shown(wrong.key)}: {shown(wrong.reason)}")
            continue
        cut += sample.length >= dataset.sequence_length
        silent += not sample.loss_mask.any()
        special.update([*sample.special_text, ""] if sample.special_text else ())
    return _Found(len(numbers), bad, cut, silent, special)


def _kind_of(line: str) -> str:
    """Return the reason in a line without its numbers, so that equal reasons can be counted."""
    reason = line.split(": ", 2)[-1]
    return re.sub(r"\d+([.,]\d+)*", "#", reason)[:100]
