"""The inputs of a run: tokenizer, shards, and the first samples as training reads them.

Only reading samples imports torch.
"""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.errors import DataError
from data.index.text_lengths import TextLengths
from data.order.sources import MixedOrder, Part, Source
from data.text_format import plural, shown
from mimo_train.config.errors import Fault
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_mix import source_names
from mimo_train.inputs.inputs import (
    build_dataset,
    fields_of,
    held_out_sets,
    shard_dataset,
    training_sources,
    without_split,
)
from mimo_train.inputs.mixture import Mixing, too_short
from mimo_train.inputs.token_inputs import require_none_for_tokens
from mimo_train.layout.batch import Batch
from mimo_train.layout.ranks import lay_out
from mimo_train.layout.run import Run, steps_of_epochs
from mimo_train.preflight.check.blocks import add_blocks
from mimo_train.preflight.check.findings import Report, Table, fault_of, spread
from mimo_train.preflight.check.indexed import look_at_indexed
from mimo_train.preflight.check.leakage import add_demo_beside_own, add_leakage
from mimo_train.preflight.check.rendered import add_rendered
from mimo_train.preflight.check.repeats import add_repeats
from mimo_train.preflight.check.sound import has_length, with_sound_values
from mimo_train.preflight.check.text_remarks import add_text_remarks
from mimo_train.preflight.check.tokenizer import tokenizer_rows

if TYPE_CHECKING:
    from data.pipeline import Dataset, Samples, TextSample

_OF_WEIGHTS = re.compile(r"data\.mix\[\d+\]\.weight$|data\.mix_schedule")
FIRST_SAMPLES = 100
"""Samples that are read and decoded."""

NAMED_SAMPLES = 5
"""Bad samples that are listed one per line; the rest is counted."""


@dataclass
class Seen:
    """Results of reading the data."""

    training_samples: int | None = None
    media_per_sample: dict[str, float] = field(default_factory=dict)
    """Pictures or clips in a sample, on average, by module."""
    fingerprint: str | None = None
    """Of the training shards, if all of them can be read."""
    complete: bool = True
    """Whether they can."""
    source_sizes: list[int] = field(default_factory=list)
    """Samples of the sources, if so."""
    steps: int | None = None
    """Of the run, by the length of its data."""
    name: str = ""
    """Of the source or held-out set, where there are several."""
    of_sources: list[Seen] = field(default_factory=list)
    """Of each source, where this is of all."""

    def row(self, what: str) -> str:
        """`what` of this source."""
        return f"{what} of {self.name}" if self.name else what


def add_data(report: Report, cfg: ConfigContainer, tokenizer: Any | None) -> Seen:
    """Training and held-out shards. Without a tokenizer, shards are opened and no sample is read."""
    rows = tokenizer_rows(report, cfg, tokenizer)
    tokenizer, cfg = tokenizer if has_length(cfg) else None, with_sound_values(cfg)
    data = cfg.data
    if not data.shards and not data.mix:
        report.faults.append(
            Fault("data.shards", "is empty: give a folder, a glob, a brace range such as x-{000000..000127}.tar")
        )
    sets = held_out_sets(cfg)
    if all(one.is_test for one in sets):
        report.notes.append("data.validation_shards is empty: no evaluation")
    sources = [(one.key, one, Seen(name=one.name)) for one in training_sources(cfg)]
    others = [(one.key, one.source, Seen(name=one.name)) for one in sets if not one.fraction]
    named = Counter(own.name for *_, own in sources + others)
    for key, _, own in sources + others:
        if own.name and named[own.name] > 1:
            own.name = key.removesuffix(".shards")
    counts: dict[str, int] = {}
    for at, (key, source, own) in enumerate(sources + others):
        training, pattern = at < len(sources), str(source.shards)
        if not pattern:
            continue
        if cfg.data.demo and _is_absent(pattern):
            rows.append((key, pattern, f"not there: the {cfg.data.demo} demo is made on first use"))
            if training:
                _add_demo_faults(report, cfg)
            continue
        samples = _add_shards(report, cfg, key, source, tokenizer, own, rows)
        if training and samples:
            counts[key] = samples
        elif samples:
            _add_fewer(report, cfg, key, samples)
    seen = Seen(of_sources=[own for *_, own in sources])
    seen.complete = all(own.complete for own in seen.of_sources)
    seen.fingerprint = seen.of_sources[0].fingerprint if len(sources) == 1 else None
    # Without the shares of the sources, as much as any of them has.
    seen.media_per_sample = _over(max, seen.of_sources)
    if len(counts) == len(sources):
        _add_whole(report, cfg, tokenizer, counts, seen, rows)
    add_repeats(report, cfg)
    add_demo_beside_own(report, cfg)
    report.tables.append(Table("Data", (), rows))
    return seen


def _over(joined: Callable[[list[float]], float], of_sources: list[Seen]) -> dict[str, float]:
    """What `joined` makes of the sources' pictures or clips in a sample, by module; empty if one was not read."""
    modules = of_sources[0].media_per_sample
    if not all(own.media_per_sample for own in of_sources):
        return {}
    return {name: joined([own.media_per_sample[name] for own in of_sources]) for name in modules}


def _add_whole(
    report: Report, cfg: ConfigContainer, tokenizer: Any, counts: dict[str, int], seen: Seen, rows: list
) -> None:
    """How long the run is in epochs, of all sources and of each, where all of their shards can be read."""
    data, sizes = cfg.data, list(counts.values())
    if any(fault.key == "data.mix" or _OF_WEIGHTS.match(fault.key) for fault in report.faults):
        return  # no order follows from such weights
    if (data.mix or data.held_out_by or data.split) and tokenizer is not None:
        seen.fingerprint = None
        try:
            dataset = build_dataset(cfg, tokenizer)
            for one in held_out_sets(cfg):
                if one.fraction:
                    with closing(build_dataset(cfg, tokenizer, held_out=one)) as held_out:
                        _add_fewer(report, cfg, one.key, len(held_out))
                        add_leakage(report, one, dataset, held_out)
        except DataError as error:
            report.faults.append(fault_of(error, next(iter(counts))))
            return
        sizes = dataset.source_sizes
        if seen.complete:
            seen.fingerprint = dataset.fingerprint
        if data.split or data.validation_fraction:
            left, share = sum(counts.values()) - sum(sizes), data.split or f"{data.validation_fraction:g}"
            rows.append((data.held_out_by or "data.split", share, f"{plural(left, 'sample')} not trained on"))
    seen.training_samples, seen.source_sizes = sum(sizes), sizes
    run = Run(cfg, lay_out(cfg), Batch.of(cfg)) if _has_batch(report) else None
    if run is None:
        return
    wanted = steps = steps_of_epochs(run, seen.training_samples) if cfg.train.epochs else cfg.train.iters
    names = source_names(data.mix)
    if len(set(names)) < len(names):  # a fault of its own; weights are by name
        return
    mixing = Mixing(cfg, run.batch, sizes)
    order = MixedOrder([Part(0, size) for size in sizes], mixing.phases, cfg.run.seed)
    shares = [[weight / sum(weights) for weight in weights] for _, weights in mixing.phases]
    of_phases = [_over(partial(_mean, share), seen.of_sources) for share in shares]
    seen.media_per_sample = {name: max(each[name] for each in of_phases) for name in of_phases[0]}
    if data.exhausted == "stop" and (end := order.exhausted()) is not None:
        source, numbers = end
        steps = min(steps, run.batch.steps_within(numbers))
        if not steps:
            report.faults.append(too_short(cfg, run.batch, sizes[source], names[source] if names else ""))
            return
    seen.steps, drawn = steps, run.batch.samples_of(steps)
    rows.append(
        (
            "epochs",
            "",
            f"{drawn / seen.training_samples:.2f} ({plural(drawn, 'sample')} drawn from {seen.training_samples:,})",
        )
    )
    add_blocks(report, cfg, seen.training_samples, rows)
    if steps < wanted:
        key = "train.epochs" if cfg.train.epochs else "train.iters"
        rows.append(("data.exhausted", "stop", f"after {steps:,} of the {plural(wanted, 'step')} of {key}"))
    if data.mix:
        drawn_of = order.counts(drawn)
        header = ("source", "samples", *_phase_names(mixing), "drawn", "epochs")
        table = [
            (name, f"{size:,}", *(f"{share[at]:.2%}" for share in shares), f"{count:,}", f"{count / size:.2f}")
            for at, (name, size, count) in enumerate(zip(names, sizes, drawn_of, strict=True))
        ]
        report.tables.append(Table("Mixture", header, table))


def _mean(share: list[float], values: list[float]) -> float:
    return sum(weight * value for weight, value in zip(share, values, strict=True))


def _phase_names(mixing: Mixing) -> list[str]:
    later = [f"from sample {start:,}" for start, _ in mixing.phases[1:]]
    return ["share", *later]


def _has_batch(report: Report) -> bool:
    """Whether layout and batch can be computed."""
    return not any(fault.key.split(".")[0] in ("modules", "placement", "train") for fault in report.faults)


def _add_shards(
    report: Report, cfg: ConfigContainer, key: str, source: Source, tokenizer: Any, seen: Seen, rows: list
) -> int:
    """Samples in the shards that can be read."""
    from data.index.catalogue import open_catalogue
    from data.indexed.find import is_indexed
    from data.order.sources import found_shards
    from data.records.members import named_unread

    pattern = str(source.shards)
    held_out = next((one for one in held_out_sets(cfg) if one.key == key), None)
    try:
        if is_indexed(source.shards):
            indexed = look_at_indexed(report, cfg, key, source, held_out, tokenizer, rows)
            seen.complete, seen.fingerprint = indexed.complete, indexed.fingerprint
            if indexed.first is not None:
                add_rendered(indexed.first, tokenizer, seen.row("first sample"), rows)
            return indexed.samples
        if held_out is None:
            require_none_for_tokens(cfg, key)
        paths = found_shards(source)
        catalogue = open_catalogue(paths, cfg.data.cache_dir or None, strict=False)
    except (DataError, OSError) as error:
        seen.complete = False
        report.faults.append(fault_of(error, key))
        return 0
    good, samples, unusable = [], 0, 0
    members: Counter[str] = Counter()
    not_read: Counter[tuple[str, str]] = Counter()
    fields = fields_of(cfg, source)
    for number, path in enumerate(paths):
        try:
            index = catalogue.index(number).with_fields(fields)
        except DataError as error:
            report.faults.append(Fault(key, str(error)))
            seen.complete = False
            continue
        good.append(path)
        samples += len(index)
        unusable += index.num_bad
        not_read += index.unread()
        members += index.extensions()
    rows.append(
        (key, pattern, f"{len(good)} of {plural(len(paths), 'shard')} can be read, {plural(samples, 'sample')}")
    )
    rows.append(("", "members", ", ".join(f"{count:,} .{name}" for name, count in sorted(members.items())) or "none"))
    report.warnings += [f"{key}: {sentence}" for sentence in named_unread(not_read)]
    if unusable:
        rows.append(("", "unusable", f"{plural(unusable, 'sample')}, according to the shards' indexes"))
    if good and not samples:
        report.faults.append(Fault(key, f"{plural(len(good), 'shard')} of {pattern} can be read, without any sample"))
    elif samples and tokenizer is not None:
        dataset = shard_dataset(without_split(cfg), tokenizer, [replace(source, shards=good)], held_out)
        if not held_out and cfg.data.pad == "microbatch":
            _add_lengths(cfg, dataset, seen, rows)
        first = range(min(FIRST_SAMPLES, len(dataset)))
        _add_samples(report, cfg, key, dataset, first, tokenizer, seen, rows)
        if len(good) < len(paths):
            seen.fingerprint = None
    return samples


def _add_lengths(cfg: ConfigContainer, dataset: Dataset, seen: Seen, rows: list) -> None:
    """Whether texts are counted already."""
    to_count = sum(dataset.samples_of(shard) for shard in TextLengths(dataset).missing())
    said = f"{plural(to_count, 'text')} to count before the first step" if to_count else "known"
    why = "data.pack=true" if cfg.data.pack else "data.pad=microbatch"
    rows.append(("", seen.row("lengths of texts"), f"{said} ({why})"))


def _add_samples(
    report: Report,
    cfg: ConfigContainer,
    key: str,
    dataset: Samples,
    first: range,
    tokenizer: Any,
    seen: Seen,
    rows: list,
) -> None:
    """Reads the first samples in the order of the run: their text, and what every encoder gets."""
    media = dataset.modules
    seen.fingerprint = dataset.fingerprint
    label = seen.row(f"first {len(first)}")
    lengths: list[int] = []
    dataset.inspects = True
    texts: list[TextSample] = []
    targets, bad, silent = [], [], []
    counts: dict[str, list[int]] = {item.module: [] for item in media}
    try:
        for number in first:
            text, found = dataset.read_text(number)
            for item in media:
                inputs, of_media = dataset.read_media(number, item.module)
                counts[item.module].append(len(inputs))
                found = found or of_media
            if found is not None:
                bad.append(f"{found.shard}, key {shown(found.key)}: {shown(found.reason)}")
                continue
            if not lengths:
                add_rendered(text, tokenizer, seen.row("first sample"), rows)
            texts.append(text)
            lengths.append(text.length)
            targets.append(int(text.loss_mask.sum()))
            if not targets[-1]:
                silent.append("{}, key {}".format(*dataset.locate(number)))
    except DataError as error:  # of this machine, and of no sample: what reads a sample is not installed
        report.faults.append(fault_of(error, key))
        return
    finally:
        dataset.close()
    seen.media_per_sample = {name: sum(numbers) / len(numbers) for name, numbers in counts.items()}
    for name, numbers in counts.items():
        medium = cfg.modules[name].encoder.medium
        rows.append((label, f"{medium}s of {name}", f"{spread(numbers)} a sample"))
    if lengths:
        limit = cfg.data.sequence_length
        full = sum(length >= limit for length in lengths)
        rows.append((label, "tokens used", f"{spread(lengths)}, of data.sequence_length {limit}"))
        rows.append((label, "tokens with loss", spread(targets)))
        if full:
            report.warnings.append(
                f"{key}: {full} of the first {len(first)} samples fill data.sequence_length {limit}: "
                "text beyond it is cut; raise data.sequence_length to keep it"
            )
    if silent:
        report.warnings.append(
            f"{key}: {len(silent)} of the first {len(first)} samples have no token with loss, for example {silent[0]}: "
            "their answer is empty, excluded from the loss, or cut by data.sequence_length"
        )
    add_text_remarks(report, f"{key}: {{}} of the first {len(first)} samples", texts, tokenizer.template)
    _add_bad(report, dataset.allowed_bad_samples, key, bad, len(first))


def _add_bad(report: Report, budget: int, key: str, bad: list[str], count: int) -> None:
    if len(bad) > budget:
        report.faults += [Fault(key, reason) for reason in bad[:NAMED_SAMPLES]]
        more = f", {len(bad) - NAMED_SAMPLES} more than named above" if len(bad) > NAMED_SAMPLES else ""
        report.faults.append(
            Fault(
                "data.max_bad_samples",
                f"allows {budget}, but {len(bad)} of the first {count} samples of {key} are bad{more}: repair them "
                "(`mimo-train shards verify` lists all), or raise data.max_bad_samples",
            )
        )
    elif bad:
        report.warnings.append(
            f"{key}: {len(bad)} of the first {count} samples are bad, data.max_bad_samples allows {budget}: {bad[0]}"
        )


def _add_fewer(report: Report, cfg: ConfigContainer, key: str, samples: int) -> None:
    if cfg.train.eval_samples > samples:
        report.warnings.append(
            f"{key}: train.eval_samples asks for {plural(cfg.train.eval_samples, 'sample')}, and there are "
            f"{samples:,}: an "
            "evaluation takes these"
        )


def _add_demo_faults(report: Report, cfg: ConfigContainer) -> None:
    if importlib.util.find_spec("sklearn") is None:
        report.faults.append(
            Fault("data.demo", f"the {cfg.data.demo} demo needs scikit-learn: pip install 'mimo-train[demo]'")
        )


def _is_absent(pattern: str) -> bool:
    """Whether there is nothing at all where the demo's shards belong."""
    path = Path(pattern)
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))
