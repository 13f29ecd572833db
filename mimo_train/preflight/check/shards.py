"""The files of a run's data: checks that they can be read, and reads their first samples as training does.

Only reading samples imports torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from data.errors import DataError
from data.indexed.file import IndexedFile
from data.indexed.find import find_indexed
from data.order.sources import Source
from data.storage.reader import ShardReader
from data.text_format import plural, shown
from encoders.transformers_media.spec import MediaImages
from mimo_train.config.errors import Fault
from mimo_train.config.schema import ConfigContainer
from mimo_train.inputs.datasets import (
    HeldOutSet,
    build_dataset,
    fields_of,
    held_out_sets,
    shard_dataset,
    without_split,
)
from mimo_train.inputs.token_files import require_none_for_tokens
from mimo_train.preflight.check.report import Report, fault_of, spread

if TYPE_CHECKING:
    from data.order.step import TextSample
    from data.samples.shard_dataset import ShardDataset
    from data.text.templates import Template

FIRST_SAMPLES = 100
"""Samples of shards to read and decode."""
_MOST_TIMES = 4
"""Bytes read for a shuffled sample of a parquet file, over its size, above which `check` warns."""
SPREAD_SAMPLES = 64
"""Samples of .bin files to read, spread evenly over all of them."""
END_DOCUMENTS = 100
"""Documents of a .bin file whose last token is read."""
NAMED_SAMPLES = 5
"""Bad samples to list one per line; the rest is counted."""
SHOWN_CHARACTERS = 400
"""Characters of a rendered sample."""
_NAMED_TOKENS = 6
"""Special tokens in a message."""


@dataclass
class Seen:
    """Results of reading the data of one source or held-out set, or of all sources."""

    training_samples: int | None = None
    media_per_sample: dict[str, float] = field(default_factory=dict)
    """Mean number of media items in a sample, by module."""
    fingerprint: str | None = None
    """Fingerprint of the training shards; None if some cannot be read."""
    complete: bool = True
    """True if all files can be read."""
    source_sizes: list[int] = field(default_factory=list)
    """Samples of each source, if all can be read."""
    steps: int | None = None
    """Steps of the run that the data lasts for."""
    name: str = ""
    """Name of the source or held-out set, if there are several."""
    of_sources: list[Seen] = field(default_factory=list)
    """Results of each source, if this is the sum."""

    def row(self, title: str) -> str:
        """Return `title` with the name of this source."""
        return f"{title} of {self.name}" if self.name else title


def add_files(
    report: Report, cfg: ConfigContainer, key: str, source: Source, tokenizer: Any, seen: Seen, rows: list
) -> int:
    """Return the number of readable samples in a source, and report faults. Without `tokenizer`, no sample is read."""
    from data.index.catalogue import open_catalogue
    from data.indexed.find import is_indexed
    from data.order.sources import found_shards

    held_out = next((item for item in held_out_sets(cfg) if item.key == key), None)
    try:
        if is_indexed(source.shards):
            return _add_indexed(report, cfg, key, source, held_out, tokenizer, seen, rows)
        if held_out is None:
            require_none_for_tokens(cfg, key)
        paths = found_shards(source)
        catalogue = open_catalogue(paths, cfg.data.cache_dir or None, strict=False)
    except (DataError, OSError) as error:
        seen.complete = False
        report.faults.append(fault_of(error, key))
        return 0
    return _add_shards(report, cfg, key, source, held_out, paths, catalogue, tokenizer, seen, rows)


def _add_shards(
    report: Report,
    cfg: ConfigContainer,
    key: str,
    source: Source,
    held_out: HeldOutSet | None,
    paths: Sequence,
    catalogue: Any,
    tokenizer: Any,
    seen: Seen,
    rows: list,
) -> int:
    from data.records.members import named_unread

    readable, samples, unusable = [], 0, 0
    members: Counter[str] = Counter()
    unread: Counter[tuple[str, str]] = Counter()
    fields = fields_of(cfg, source)
    for number, path in enumerate(paths):
        try:
            index = catalogue.index(number).with_fields(fields)
        except DataError as error:
            report.faults.append(Fault(key, str(error)))
            seen.complete = False
            continue
        readable.append(path)
        samples += len(index)
        unusable += index.num_bad
        unread += index.unread()
        members += index.extensions()
    pattern = str(source.shards)
    rows.append(
        (key, pattern, f"{len(readable)} of {plural(len(paths), 'shard')} can be read, {plural(samples, 'sample')}")
    )
    rows.append(("", "members", ", ".join(f"{count:,} .{name}" for name, count in sorted(members.items())) or "none"))
    report.warnings += [f"{key}: {sentence}" for sentence in named_unread(unread)]
    if unusable:
        rows.append(("", "unusable", f"{plural(unusable, 'sample')}, according to the shards' indexes"))
    if readable and not samples:
        text = f"{plural(len(readable), 'shard')} of {pattern} can be read, without any sample"
        report.faults.append(Fault(key, text))
    elif samples and tokenizer is not None:
        dataset = shard_dataset(without_split(cfg), tokenizer, [replace(source, shards=readable)], held_out)
        if held_out is None:
            _add_row_groups(report, cfg, key, dataset, rows)
        _add_first_samples(report, cfg, key, dataset, tokenizer, seen, rows)
        if len(readable) < len(paths):
            seen.fingerprint = None
    return samples


def _add_row_groups(report: Report, cfg: ConfigContainer, key: str, dataset: ShardDataset, rows: list) -> None:
    """Report the row groups of the first parquet file; warn if shuffled samples make most reads useless."""
    from data.rows.row_reader import CACHE_BYTES, is_table

    tables = [number for number, shard in enumerate(dataset.shards) if is_table(shard)]
    if not tables:
        return
    sizes = [dataset.version(number).size for number in tables]
    table = dataset.reader.table(dataset.shards[tables[0]], dataset.version(tables[0]))
    group, block = max(table.group_rows, 1), cfg.data.shuffle_block
    group_bytes = sizes[0] * group / max(table.ends[-1], 1)
    rows.append(("", "row groups", f"{plural(group, 'row')}, {group_bytes / 1e6:.3g} MB"))
    times = group / min(block, group)
    if cfg.data.shuffle and times > _MOST_TIMES and sum(sizes) > CACHE_BYTES:
        report.warnings.append(
            f"{key}: a row group of {table.path.name} has {group:,} rows ({group_bytes / 1e6:.3g} MB), and blocks of "
            f"{plural(block, 'sample')} are shuffled: each sample reads about {times:,.0f} times its size. Set "
            f"data.shuffle_block={group}, or make shards with `mimo-train shards build`"
        )


def _add_first_samples(
    report: Report, cfg: ConfigContainer, key: str, dataset: ShardDataset, tokenizer: Any, seen: Seen, rows: list
) -> None:
    first = range(min(FIRST_SAMPLES, len(dataset)))
    modules = [item.module for item in dataset.modules]
    seen.fingerprint = dataset.fingerprint
    texts: list[TextSample] = []
    bad, without_loss = list[str](), list[str]()
    counts: dict[str, list[dict[str, int]]] = {module: [] for module in modules}
    largest = {module: list[float]() for module in modules}
    dataset.inspects = True
    try:
        for number in first:
            text, fault = dataset.read_text(number)
            for module in modules:
                inputs, media_fault = dataset.read_media(number, module)
                counts[module].append(_counts_of(cfg, dataset, number, module))
                most = cfg.modules[module].encoder.most_tokens(cfg.modules[module].projector.merge)
                largest[module].append(max(len(inputs), dataset.token_counts(number)[module] / max(most, 1)))
                fault = fault or media_fault
            if fault is not None:
                bad.append(f"{fault.shard}, key {shown(fault.key)}: {shown(fault.reason)}")
                continue
            texts.append(text)
            if not text.loss_mask.any():
                without_loss.append("{}, key {}".format(*dataset.locate(number)))
    except DataError as error:  # a fault of this machine: a package to read samples is missing
        report.faults.append(fault_of(error, key))
        return
    finally:
        dataset.close()
    if texts:
        _add_rendered(texts[0], tokenizer, seen.row("first sample"), rows)
    seen.media_per_sample = {name: sum(numbers) / len(numbers) for name, numbers in largest.items()}
    label = seen.row(f"first {len(first)}")
    for name, of_samples in counts.items():
        for medium in dict.fromkeys(medium for of_sample in of_samples for medium in of_sample):
            numbers = [of_sample.get(medium, 0) for of_sample in of_samples]
            if any(numbers) or "video" not in medium:
                rows.append((label, f"{medium}s of {name}", f"{spread(numbers)} a sample"))
    _add_unread_sound(report, cfg, key, dataset, first)
    if texts:
        limit, lengths = cfg.data.sequence_length, [answer.length for text in texts for answer in text.answers]
        rows.append((label, "tokens used", f"{spread(lengths)}, of data.sequence_length {limit}"))
        learned = [int(answer.loss_mask.sum()) for text in texts for answer in text.answers]
        rows.append((label, "tokens with loss", spread(learned)))
        if full := sum(max(answer.length for answer in text.answers) >= limit for text in texts):
            report.warnings.append(
                f"{key}: {full} of the first {len(first)} samples fill data.sequence_length {limit}: "
                "text beyond it is cut; raise data.sequence_length to keep it"
            )
    if without_loss:
        report.warnings.append(
            f"{key}: {len(without_loss)} of the first {len(first)} samples have no token with loss, for example "
            f"{without_loss[0]}: their answer is empty, excluded from the loss, or cut by data.sequence_length"
        )
    _add_text_remarks(report, f"{key}: {{}} of the first {len(first)} samples", texts, tokenizer.template)
    _add_bad(report, dataset.allowed_bad_samples, key, bad, len(first))


def _counts_of(cfg: ConfigContainer, dataset: ShardDataset, number: int, module: str) -> dict[str, int]:
    """Return the numbers of a module's images, videos and frames of these, or audio items and sounds of videos, in a
    sample."""
    from data.samples.sample_meta import extent_of

    encoder = cfg.modules[module].encoder
    members = dataset.meta(number).members[encoder.kind]
    videos = [member for member in members if member.kind == "video"]
    frames = sum(1 if member.frame else len(encoder.video_frames(*extent_of(member))) for member in videos)
    first = sum(member.frame is None or member.frame.number == 0 for member in videos)
    sounds = sum(member.is_sound for member in members)
    others = len(members) - len(videos) - sounds
    return {encoder.medium: others, "video": first, "video frame": frames, "video sound": sounds}


def _add_unread_sound(report: Report, cfg: ConfigContainer, key: str, dataset: ShardDataset, first: range) -> None:
    """Add a note on the sound of videos that the model can read and the config does not ask for."""
    metas = [dataset.meta(number) for number in first]
    count = sum(any(member.sound for member in dataset.index(meta.shard).members(meta.row)) for meta in metas)
    has_audio = any(module.encoder.kind == "audio" for module in cfg.encoders.values())
    for name, module in cfg.encoders.items() if count and has_audio else ():
        if isinstance(module.encoder, MediaImages) and module.encoder.can_read_sound and not module.encoder.sound:
            report.notes.append(
                f"{key}: {count} of the first {len(first)} samples have videos with sound, which is not read. Set "
                f"modules.{name}.encoder.sound=true to read it"
            )


def _add_bad(report: Report, allowed: int, key: str, bad: list[str], count: int) -> None:
    if len(bad) > allowed:
        report.faults += [Fault(key, reason) for reason in bad[:NAMED_SAMPLES]]
        more = f", {len(bad) - NAMED_SAMPLES} more than named above" if len(bad) > NAMED_SAMPLES else ""
        report.faults.append(
            Fault(
                "data.max_bad_samples",
                f"allows {allowed}, but {len(bad)} of the first {count} samples of {key} are bad{more}: repair them "
                "(`mimo-train shards verify` lists all), or raise data.max_bad_samples",
            )
        )
    elif bad:
        report.warnings.append(
            f"{key}: {len(bad)} of the first {count} samples are bad, data.max_bad_samples allows {allowed}: {bad[0]}"
        )


def _add_indexed(
    report: Report,
    cfg: ConfigContainer,
    key: str,
    source: Source,
    held_out: HeldOutSet | None,
    tokenizer: Any,
    seen: Seen,
    rows: list,
) -> int:
    paths, files = find_indexed(source.shards), []
    for path in paths:
        try:
            file = IndexedFile(path, cfg.data.read_retries)
            file.require_whole()
        except DataError as error:
            report.faults.append(Fault(key, str(error)))
        else:
            files.append(file)
    seen.complete = len(files) == len(paths)
    rows.append((key, str(source.shards), f"{len(files)} of {plural(len(paths), 'pair')} of .bin and .idx can be read"))
    if not files:
        return 0
    tokens = sum(file.tokens for file in files)
    types = ", ".join(sorted({file.dtype.name for file in files}))
    rows.append(("", "documents", f"{sum(file.documents for file in files):,}, of {tokens:,} tokens ({types})"))
    if tokenizer is None or cfg.data.sequence_length < 1:
        return 0
    _add_ends(report, key, files, tokenizer)
    try:
        readable = replace(source, shards=[file.index for file in files])
        dataset = build_dataset(without_split(cfg), tokenizer, held_out=held_out, shards=[readable])
    except DataError as error:
        report.faults.append(fault_of(error, key))
        return 0
    samples = len(dataset)
    seen.fingerprint = dataset.fingerprint if seen.complete else None
    rows.append(("", "samples", f"{samples:,} of data.sequence_length {cfg.data.sequence_length}"))
    try:
        first, _ = dataset.read_text(0)
        _add_rendered(first, tokenizer, seen.row("first sample"), rows)
        for number in np.unique(np.linspace(0, samples - 1, SPREAD_SAMPLES).astype(np.int64)).tolist():
            dataset.read_text(number)
    except DataError as error:
        report.faults.append(fault_of(error, key))
    finally:
        dataset.close()
    return samples


def _add_ends(report: Report, key: str, files: list[IndexedFile], tokenizer: Any) -> None:
    end = tokenizer.end_of_turn_id
    without_end, count, reader = 0, 0, ShardReader()
    for file in files:
        starts = file.starts(np.arange(min(END_DOCUMENTS, file.documents) + 1))
        for stop in starts[1:][np.diff(starts) > 0].tolist():
            (last,) = file.read(reader, stop - 1, 1)
            count, without_end = count + 1, without_end + (last != end)
    reader.close()
    if without_end:
        report.warnings.append(
            f"{key}: {without_end} of {plural(count, 'document')} do not end with {tokenizer.shown([end])} (id {end}), "
            "the tokenizer's end of a text: a model does not learn where texts end; `preprocess_data.py --append-eod` "
            "writes it"
        )


def _add_rendered(text: Any, tokenizer: Any, title: str, rows: list) -> None:
    rendered = ""
    runs = groupby(text.input_ids[: text.length].tolist(), key=lambda token: (tokenizer.as_text(token) != token, token))
    for is_media, group in groupby(runs, key=lambda run: run[0][0]):
        members = [list(run) for _, run in group]
        if is_media:
            rendered += "".join(f"{tokenizer.shown(run[:1])} x {len(run)} " for run in members)
        else:
            rendered += tokenizer.shown([token for run in members for token in run])
    first, *others = [tokenizer.shown(answer.labels[answer.loss_mask > 0].tolist()) for answer in text.answers]
    for name, words in (("rendered", rendered), ("learned", first), *(("compared with", other) for other in others)):
        line = words.replace("\n", "\\n")
        cut = line if len(line) <= SHOWN_CHARACTERS else f"{line[:SHOWN_CHARACTERS]} ..."
        rows.append((title, name, cut))


def special_sentence(count: int, tokens: Sequence[str]) -> str:
    """Return the end of a sentence that starts with the number of samples."""
    named = " ".join(tokens[:_NAMED_TOKENS]) + (" ..." if len(tokens) > _NAMED_TOKENS else "")
    has = "has" if count == 1 else "have"
    return f"{has} special tokens of the tokenizer as plain text ({named})"


def _add_text_remarks(report: Report, samples: str, texts: Sequence[TextSample], template: Template) -> None:
    """Warn of special tokens that are read as plain text. Note line breaks that a directory's template does not get.

    Args:
        samples: format string for the number of samples.
        texts: texts of inspected samples, see `data.samples.protocol.Samples.inspects`.
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
