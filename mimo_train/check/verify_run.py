"""`mimo-train shards verify CONFIG`: every sample of a run, as the run would read it.

Not only whether files can be decoded: the run's bounds, its template and tokenizer, its fields, and what each module
takes. Samples are read in several processes, each with a dataset of its own.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from data.errors import DataError
from data.members import named_unread
from data.shown import shown
from mimo_train.config import compose
from mimo_train.config.fault import ConfigError
from mimo_train.config.schema import ConfigContainer
from mimo_train.plan.inputs import build_dataset, fields_of, tokenizer_of
from mimo_train.plan.run import config_faults

_AT_ONCE = 64  # samples that a process takes at a time
_SETS = (("data.shards", False), ("data.validation_shards", True))

_readers: dict[bool, Any] = {}
"""Datasets of a worker process, by whether they are held out."""


@dataclass(frozen=True)
class _Found:
    """What a range of samples is like."""

    bad: list[str]
    """A line for each bad sample."""
    cut: int
    """Samples whose text is cut by `data.sequence_length`."""
    silent: int
    """Samples without any token with loss."""


def verify_run(config: str, overrides: Sequence[str], workers: int) -> int:
    """Read every sample of a run's shards, name the bad ones, and sum up. Returns the exit code: 0 if the run could
    read them all, or all but as many as `data.max_bad_samples` allows.

    Raises:
        ConfigError: the config has faults.
    """
    cfg = compose.load(config, overrides)
    if faults := config_faults(cfg):
        raise ConfigError(faults)
    code, sets = 0, [pair for pair in _SETS if getattr(cfg.data, pair[0].partition(".")[2])]
    with ExitStack() as stack:
        pool = None
        if workers > 1:
            context = get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(workers, context, _open, (config, list(overrides))))
        else:
            _open(config, overrides)
        for key, held_out in sets:
            try:
                dataset = build_dataset(cfg, tokenizer_of(cfg), held_out=held_out)
                code |= _verify_set(cfg, key, held_out, dataset, pool)
            except DataError as error:  # a shard that cannot be read
                code = 1
                print(f"bad shard: {shown(str(error))}")
    return code


def _verify_set(cfg: ConfigContainer, key: str, held_out: bool, dataset: Any, pool: ProcessPoolExecutor | None) -> int:
    size, allowed = len(dataset), dataset.allowed_bad_samples
    jobs = [(held_out, first, min(first + _AT_ONCE, size)) for first in range(0, size, _AT_ONCE)]
    results: Iterator[_Found] = pool.map(_read, jobs) if pool else map(_read, jobs)
    bad, cut, silent, reasons = 0, 0, 0, Counter[str]()
    for found in results:
        bad, cut, silent = bad + len(found.bad), cut + found.cut, silent + found.silent
        for line in found.bad:
            print(f"bad: {line}")
            reasons[_kind_of(line)] += 1
    for sentence in named_unread(dataset.unread_members()):
        print(f"warning: {key}: {sentence}", file=sys.stderr)
    fields = "" if not cfg.data.fields else f", data.fields {sorted(fields_of(cfg).members)}"
    print(f"{key}: {size:,} samples, {bad:,} bad, data.max_bad_samples allows {allowed:,}{fields}")
    print(f"  {cut:,} fill data.sequence_length {cfg.data.sequence_length}, {silent:,} have no token with loss")
    for reason, count in reasons.most_common(8):
        print(f"  {count:,} x {reason}")
    return int(bad > allowed)


def _open(config: str, overrides: Sequence[str]) -> None:
    """Build the datasets of this process."""
    cfg = compose.load(config, overrides)
    tokenizer = tokenizer_of(cfg)
    for key, held_out in _SETS:
        if getattr(cfg.data, key.partition(".")[2]):
            # In the order of the shards, whatever the run's is.
            cfg.data.shuffle = False
            try:
                _readers[held_out] = build_dataset(cfg, tokenizer, held_out=held_out)
            except DataError:
                _readers.pop(held_out, None)  # said once, by the main process


def _read(job: tuple[bool, int, int]) -> _Found:
    held_out, first, end = job
    dataset, bad, cut, silent = _readers[held_out], list[str](), 0, 0
    for number in range(first, end):
        sample, wrong = dataset.read_text(number)
        for media in dataset.modules:
            wrong = wrong or dataset.read_media(number, media.module)[1]
        if wrong is not None:
            bad.append(f"{wrong.shard}: key {shown(wrong.key)}: {shown(wrong.reason)}")
            continue
        cut += sample.length >= dataset.sequence_length
        silent += not sample.loss_mask.any()
    return _Found(bad, cut, silent)


def _kind_of(line: str) -> str:
    """The reason in a line without what differs from sample to sample, so that equal ones can be counted."""
    reason = line.split(": ", 2)[-1]
    return "".join("#" if char.isdigit() else char for char in reason)[:100]
