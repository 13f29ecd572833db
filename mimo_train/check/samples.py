"""The inputs of a run: tokenizer, shards, and the first samples as training reads them.

Only reading samples imports torch.
"""

import importlib.util
from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.shown import shown
from data.text_lengths import TextLengths
from mimo_train.check.findings import Report, Table, plural, spread
from mimo_train.config.fault import Fault
from mimo_train.config.schema import ConfigContainer
from mimo_train.plan.batch import Batch
from mimo_train.plan.inputs import build_dataset, tokenizer_of

FIRST_SAMPLES = 100
"""Samples that are read and decoded."""

SHOWN_CHARACTERS = 400
"""Of the first sample."""

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


def build_tokenizer(report: Report, cfg: ConfigContainer) -> Any | None:
    """The run's tokenizer, or None and a fault."""
    if any(fault.key == "data.tokenizer" for fault in report.faults):
        return None
    try:
        return tokenizer_of(cfg)
    except DataError as error:
        # Its template and its variables have keys of their own.
        key = str(error).partition(":")[0]
        key = key if key in ("data.chat_template", "data.template_variables") else "data.tokenizer"
        report.faults.append(Fault(key, _without_key(error, key)))
        return None


def add_data(report: Report, cfg: ConfigContainer, tokenizer: Any | None) -> Seen:
    """Training and held-out shards. Without a tokenizer, shards are opened and no sample is read."""
    seen, rows = Seen(), [("data.tokenizer", cfg.data.tokenizer if tokenizer else "at fault", "")]
    if tokenizer:
        rows = [("data.tokenizer", cfg.data.tokenizer, f"{tokenizer.vocab_size:,} ids")]
        rows.append(("data.chat_template", cfg.data.chat_template, tokenizer.template.name))
        report.warnings += [f"data.chat_template: {note}" for note in tokenizer.template.notes]
    if not cfg.data.shards:
        report.faults.append(
            Fault("data.shards", "is empty: give a folder, a glob, a brace range such as x-{000000..000127}.tar")
        )
    if not cfg.data.validation_shards:
        report.notes.append("data.validation_shards is empty: no evaluation")
    for key, training in (("data.shards", True), ("data.validation_shards", False)):
        pattern = cfg.data.shards if training else cfg.data.validation_shards
        if not pattern:
            continue
        if cfg.data.demo and _is_absent(pattern):
            rows.append((key, pattern, f"not there: the {cfg.data.demo} demo is made on first use"))
            if training:
                _add_demo_faults(report, cfg)
            continue
        samples = _add_shards(report, cfg, key, pattern, tokenizer, seen if training else Seen(), rows)
        if training and samples:
            seen.training_samples = samples
            drawn = Batch.of(cfg).samples_of(cfg.train.iters)
            rows.append(("epochs", "", f"{drawn / samples:.2f} ({drawn:,} samples drawn from {samples:,})"))
    _add_repeats(report, cfg)
    report.tables.append(Table("Data", (), rows))
    return seen


def _add_repeats(report: Report, cfg: ConfigContainer) -> None:
    """Warnings of shards that are named more than once, or both for training and for evaluation."""
    from data.shards import find_shards

    files: dict[str, Counter[Path]] = {}
    for key in ("shards", "validation_shards"):
        try:
            files[key] = Counter(path.resolve() for path in find_shards(getattr(cfg.data, key)))
        except (DataError, OSError):
            continue  # none, or a fault of its own
        twice = [path for path, times in files[key].items() if times > 1]
        if twice:
            report.warnings.append(
                f"data.{key}: {plural(len(twice), 'shard')}, such as {twice[0]}, "
                "named more than once: an epoch has their samples as often"
            )
    if both := sorted(files.get("shards", Counter()) & files.get("validation_shards", Counter())):
        report.warnings.append(
            f"data.validation_shards: {plural(len(both), 'shard')}, such as {both[0]}, also in data.shards: "
            "the evaluation sees what was trained on"
        )


def _add_shards(
    report: Report, cfg: ConfigContainer, key: str, pattern: str, tokenizer: Any, seen: Seen, rows: list
) -> int:
    """Samples in the shards that can be read."""
    from data.index import ignored, open_index
    from data.shards import find_shards

    try:
        paths = find_shards(pattern)
    except (DataError, OSError) as error:
        report.faults.append(Fault(key, _without_key(error, "data.shards")))
        return 0
    good, samples, unusable = [], 0, 0
    members: Counter[str] = Counter()
    for path in paths:
        try:
            index = open_index(path, cfg.data.cache_dir or None)
        except (DataError, OSError) as error:
            report.faults.append(Fault(key, str(error)))
            continue
        good.append(path)
        samples += len(index)
        unusable += index.num_bad
        for extension, count in Counter(index.all_members["extension"].tolist()).items():
            members[index.extensions[extension]] += count
    rows.append(
        (key, pattern, f"{len(good)} of {plural(len(paths), 'shard')} can be read, {plural(samples, 'sample')}")
    )
    rows.append(("", "members", ", ".join(f"{count:,} .{name}" for name, count in sorted(members.items())) or "none"))
    if unread := ignored(members):
        named = ", ".join(f".{name} ({members[name]:,})" for name in unread)
        report.warnings.append(f"{key}: members {named} are neither pictures, audio nor records: they are not read")
    if unusable:
        rows.append(("", "unusable", f"{unusable:,} samples, according to the shards' indexes"))
    if good and not samples:
        report.faults.append(Fault(key, f"{plural(len(good), 'shard')} of {pattern} can be read, without any sample"))
    elif samples and tokenizer is not None and cfg.data.sequence_length > 0:
        _add_samples(report, cfg, key, [str(path) for path in good], tokenizer, seen, rows)
        if len(good) < len(paths):
            seen.fingerprint = None
    return samples


def _add_samples(
    report: Report, cfg: ConfigContainer, key: str, shards: list[str], tokenizer: Any, seen: Seen, rows: list
) -> None:
    """Reads the first samples in the order of the run: their text, and what every encoder gets."""
    held_out = key != "data.shards"
    dataset = build_dataset(cfg, tokenizer, held_out=held_out, shards=shards)
    media = dataset.modules
    seen.fingerprint = dataset.fingerprint
    if not held_out and cfg.data.pad == "microbatch":
        to_count = sum(dataset.samples_of(shard) for shard in TextLengths(dataset).missing())
        said = f"{plural(to_count, 'text')} to count before the first step" if to_count else "known"
        rows.append(("", "lengths of texts", f"{said} (data.pad=microbatch)"))
    first = range(min(FIRST_SAMPLES, len(dataset)))
    lengths: list[int] = []
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
                _add_rendered(text, tokenizer, rows)
            lengths.append(text.length)
            targets.append(int(text.loss_mask.sum()))
            if not targets[-1]:
                silent.append("{}, key {}".format(*dataset.locate(number)))
    finally:
        dataset.close()
    seen.media_per_sample = {name: sum(numbers) / len(numbers) for name, numbers in counts.items()}
    for name, numbers in counts.items():
        medium = cfg.modules[name].encoder.medium
        rows.append((f"first {len(first)}", f"{medium}s of {name}", f"{spread(numbers)} a sample"))
    if lengths:
        limit = cfg.data.sequence_length
        full = sum(length >= limit for length in lengths)
        rows.append((f"first {len(first)}", "tokens used", f"{spread(lengths)}, of data.sequence_length {limit}"))
        rows.append((f"first {len(first)}", "tokens with loss", spread(targets)))
        if full:
            report.warnings.append(
                f"{key}: {full} of the first {len(first)} samples fill data.sequence_length {limit}: "
                "text beyond it is cut; raise data.sequence_length to keep it"
            )
    if silent:
        report.warnings.append(
            f"{key}: {len(silent)} of the first {len(first)} samples have no token with loss, for example {silent[0]}: "
            "their answer is empty, or cut by data.sequence_length"
        )
    _add_bad(report, cfg, key, bad, len(first))


def _add_rendered(text: Any, tokenizer: Any, rows: list) -> None:
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
    rows.append(("first sample", "rendered", _cut(shown)))
    rows.append(("first sample", "learned", _cut(learned)))


def _cut(text: str) -> str:
    """On one line, and not too much."""
    line = text.replace("\n", "\\n")
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[:SHOWN_CHARACTERS]} ..."


def _add_bad(report: Report, cfg: ConfigContainer, key: str, bad: list[str], count: int) -> None:
    budget = cfg.data.max_bad_samples
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


def _add_demo_faults(report: Report, cfg: ConfigContainer) -> None:
    if importlib.util.find_spec("sklearn") is None:
        report.faults.append(
            Fault("data.demo", f"the {cfg.data.demo} demo needs scikit-learn: pip install 'mimo-train[demo]'")
        )


def _is_absent(pattern: str) -> bool:
    """Whether there is nothing at all where the demo's shards belong."""
    path = Path(pattern)
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def _without_key(error: Exception, key: str) -> str:
    return str(error).removeprefix(f"{key}:").removeprefix(f"{key} ").strip()
