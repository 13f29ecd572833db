"""`mimo-train shards inspect` and `verify`: shards, samples of a run, and `.bin` and `.idx` files."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.storage.url import is_url
from data.text_format import plural, shown
from mimo_train.config.errors import UserError

if TYPE_CHECKING:
    from data.indexed.file import IndexedFile

NOT_READ = "records and media are not read here: `mimo-train shards verify` reads them"
_MEASURED = 1000
"""Samples of a page whose lengths are counted."""
_SHOWN = 20
"""Samples of a page."""
_TOKENS = 1 << 22
"""Tokens that are read at once."""


def inspect(args: argparse.Namespace) -> int:
    """Run `shards inspect`."""
    from data.indexed.find import is_indexed

    if args.html or args.overrides or is_config_name(args.pattern):
        if not is_config_name(args.pattern):
            what = "--html shows samples as a run reads them" if args.html else f"{args.overrides[0]} is of a config"
            raise UserError(f"{what}, and {args.pattern} is no config: give one, with data.shards=... for other shards")
        if not args.html:
            raise UserError(f"{args.pattern} is a config: give --html FILE, or the shards themselves")
        return _write_page(args)
    if is_indexed(args.pattern):
        return _inspect_tokens(args.pattern, 3 if args.samples is None else args.samples)
    return _inspect_shards(args)


def verify(args: argparse.Namespace) -> int:
    """Run `shards verify`."""
    from data.indexed.find import is_indexed

    if is_config_name(args.pattern):
        from mimo_train.preflight.check.verify_run import verify_run

        overrides = [f"data.cache_dir={args.cache_dir}"] if args.cache_dir else []
        return verify_run(args.pattern, [*args.overrides, *overrides], args.workers)
    if args.overrides:
        raise UserError(f"{args.overrides[0]}: changes are those of a config, and {args.pattern} is none")
    if is_indexed(args.pattern):
        return _verify_tokens(args.pattern)
    return _verify_shards(args)


def _verify_shards(args: argparse.Namespace) -> int:
    from collections import Counter
    from concurrent.futures import ThreadPoolExecutor
    from functools import partial

    from data.errors import DataError
    from data.index.catalogue import open_catalogue
    from data.index.find_shards import find_shards
    from data.records.members import named_unread
    from data.rows.row_reader import RowReader
    from data.samples.verify import check_sample

    reader, checked, bad, broken = RowReader(), 0, 0, 0
    not_read: Counter[tuple[str, str]] = Counter()
    with ThreadPoolExecutor(args.workers) as pool:
        paths = find_shards(args.pattern)
        catalogue = open_catalogue(paths, args.cache_dir, strict=False)
        for number, path in enumerate(paths):
            try:
                index = catalogue.index(number)
                not_read += index.unread()
                if not len(index):
                    print(f"warning: {path}: no sample in it", file=sys.stderr)
                # In blocks: a shard may hold a million samples, and each waiting result takes memory.
                for start in range(0, len(index), 4096):
                    rows = range(start, min(start + 4096, len(index)))
                    reasons = pool.map(partial(check_sample, reader, index), rows)
                    for row, reason in zip(rows, reasons, strict=True):
                        checked += 1
                        if reason:
                            bad += 1
                            print(f"bad: {path}: key {shown(index.key(row))}: {shown(reason)}")
            except DataError as error:
                broken += 1
                print(f"bad shard: {shown(str(error))}")
    for sentence in named_unread(not_read):
        print(f"warning: {sentence}", file=sys.stderr)
    print(f"{plural(checked, 'sample')} checked, {bad} bad; {plural(broken, 'shard')} cannot be read")
    return 1 if bad or broken or not checked else 0


def _inspect_shards(args: argparse.Namespace) -> int:
    from collections import Counter

    from data.index.catalogue import open_catalogue
    from data.index.find_shards import find_shards
    from data.records.members import named_unread

    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    images: Counter[tuple[int, int]] = Counter()
    not_read: Counter[tuple[str, str]] = Counter()
    audio, faults = [], []
    samples = printed = 0
    shards: dict[Any, int] = {}
    paths = find_shards(args.pattern)
    catalogue = open_catalogue(paths, args.cache_dir)
    for number, path in enumerate(paths):
        index = catalogue.index(number)
        samples, shards[path] = samples + len(index), index.version.size
        not_read += index.unread()
        for row in range(len(index)):
            members = index.members(row)
            for member in members:
                counts[member.extension] += 1
                sizes[member.extension] += member.size
                if member.kind == "image":
                    images[member.height, member.width] += 1
                if member.kind == "audio":
                    audio.append((member.rate, member.frames))
            if fault := index.bad_reason(row):
                faults.append(f"{path}: key {shown(index.key(row))}: {shown(fault)}")
            if printed < (3 if args.samples is None else args.samples):
                printed += 1
                listed = ", ".join(_describe(member) for member in members)
                print(f"{path.name}  {shown(index.key(row))}  {listed}")
    total = sum(shards.values())
    print(
        f"\n{plural(len(shards), 'shard')}, {plural(samples, 'sample')}, {total / 1e6:.1f} MB, "
        f"{plural(len(faults), 'sample')} bad by their headers; {NOT_READ}"
    )
    print(f"\n{'member':<16}{'count':>10}{'mean bytes':>12}{'MB':>10}")
    for extension, count in sorted(counts.items()):
        print(f".{shown(extension):<15}{count:>10}{sizes[extension] / count:>12.0f}{sizes[extension] / 1e6:>10.1f}")
    for sentence in named_unread(not_read):
        print(sentence)
    if images:
        print(f"\n{'height x width':<16}{'images':>10}")
        for (height, width), count in images.most_common(10):
            print(f"{f'{height} x {width}' if height else 'unreadable':<16}{count:>10}")
        if len(images) > 10:
            print(f"and {len(images) - 10} other sizes")
    _print_audio(audio)
    for fault in faults[:10]:
        print(f"bad: {fault}")
    return 0


def _print_audio(audio: list[tuple[int, int]]) -> None:
    """Print number and seconds of the audio files of each rate, from (samples per second, samples) of each."""
    if audio:
        print(f"\n{'samples a second':<16}{'audio':>10}{'shortest':>12}{'longest':>10}{'hours':>10}")
    for rate in sorted({rate for rate, _ in audio}):
        lengths = [frames for other, frames in audio if other == rate]
        seconds = [length / (rate or 1) for length in lengths]
        times = f"{min(seconds):>10.2f} s{max(seconds):>8.2f} s{sum(seconds) / 3600:>10.2f}" if rate else ""
        print(f"{rate or 'unreadable':<16}{len(lengths):>10}{times}")


def _describe(member: Any) -> str:
    if member.kind == "image":
        return f".{shown(member.extension)} {member.height}x{member.width}"
    if member.kind == "video":
        seconds = member.milliseconds / 1000
        sound = f", {member.sound / 1000:.2f} s of sound" if member.sound else ""
        return f".{shown(member.extension)} {member.height}x{member.width}, {seconds:.2f} s{sound}"
    if member.kind == "audio":
        return f".{shown(member.extension)} {member.frames} samples at {member.rate} Hz"
    return f".{shown(member.extension)} {member.size} bytes"


def is_config_name(name: str) -> bool:
    """True if an argument names a config and not shards."""
    from mimo_train.config.compose import is_config

    return not is_url(name) and not Path(name).is_dir() and is_config(name)


def _write_page(args: argparse.Namespace) -> int:
    """Write a page with the first samples of a run, in its order."""
    from data.storage.files import replacing
    from data.text_format import plural, shown
    from mimo_train.config.compose import load
    from mimo_train.logging.report.page import render_data
    from mimo_train.run_dataset import open_dataset

    cfg = load(args.pattern, args.overrides, weights=False)
    cache_dir = args.cache_dir or cfg.data.cache_dir
    dataset = open_dataset(replace(cfg, data=replace(cfg.data, cache_dir=cache_dir)))
    number = min(_SHOWN if args.samples is None else args.samples, len(dataset))
    read = [dataset[at] for at in range(number)]
    samples = [dataset.decode(answer) for sample in read for answer in (sample, *sample.others)]
    lengths, learned, bad = [], [], 0
    for at in range(min(_MEASURED, len(dataset))):
        text, bad_text = dataset.samples.read_text(at)
        lengths += [answer.length for answer in text.answers]
        learned += [int((answer.loss_mask > 0).sum()) for answer in text.answers]
        bad += bad_text is not None
    full = sum(length >= cfg.data.sequence_length for length in lengths)
    facts = [
        ("shards", f"{len(dataset.samples.shards):,} with {plural(len(dataset), 'sample')}"),
        ("tokens", f"{_spread(lengths)}; with loss {_spread(learned)}, of the first {len(lengths):,} samples"),
        ("cut or full", f"{full:,} at {cfg.data.sequence_length} tokens"),
        ("bad", f"{bad:,}"),
    ]
    page = render_data(shown(args.pattern), facts, lengths, samples)
    with replacing(Path(args.html)) as file:
        file.write(page.encode(errors="replace"))
    print(f"{args.html}: {plural(number, 'sample')}, lengths of {len(lengths)}")
    return 0


def _spread(numbers: list[int]) -> str:
    if not numbers:
        return "none"
    return f"{min(numbers):,} to {max(numbers):,}, {sum(numbers) / len(numbers):,.1f} on average"


def _inspect_tokens(pattern: str, samples: int) -> int:
    """Print the numbers of documents and tokens, their lengths, and tokens of the first. Raises DataError."""
    import numpy as np

    from data.storage.reader import ShardReader

    reader = ShardReader()
    for file in _files(pattern):
        lengths = np.diff(file.starts(np.arange(file.documents + 1)))
        print(_line(file))
        if len(lengths):
            print(f"  tokens of a document: {lengths.min():,} to {lengths.max():,}, {lengths.mean():,.1f} on average")
        for document in range(min(samples, file.documents)):
            (first,) = file.starts(np.array([document])).tolist()
            tokens = file.read(reader, first, min(int(lengths[document]), 16)).tolist()
            print(f"  document {document}, {plural(int(lengths[document]), 'token')}: {' '.join(map(str, tokens))}")
    return 0


def _verify_tokens(pattern: str) -> int:
    """Check the index, and read every token. Raises DataError."""
    from data.storage.reader import ShardReader

    reader = ShardReader()
    for file in _files(pattern):
        file.require_whole()
        most, least = -1, 0
        for first in range(0, file.tokens, _TOKENS):
            tokens = file.read(reader, first, min(_TOKENS, file.tokens - first))
            most, least = max(most, int(tokens.max())), min(least, int(tokens.min()))
        print(f"{_line(file)}, the largest {most}")
        if least < 0:
            print(f"bad: {file.path}: has the token {least}, which is none")
            return 1
    return 0


def _files(pattern: str) -> list[IndexedFile]:
    from data.indexed.file import IndexedFile
    from data.indexed.find import find_indexed

    return [IndexedFile(path) for path in find_indexed(pattern)]


def _line(file: IndexedFile) -> str:
    documents, tokens = plural(file.documents, "document"), plural(file.tokens, "token")
    return f"{file.path}: {documents}, {tokens} ({file.dtype.name})"
