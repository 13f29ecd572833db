"""`mimo-train shards ...`: build, index, inspect and verify shards, and make the demos."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from data.storage.url import Place
from data.text_format import plural, shown
from mimo_train.commands import shards_build, shards_inspect
from mimo_train.commands.arguments import CONFIG_HELP, OVERRIDE_HELP, about_files, positive, whole
from mimo_train.config.errors import UserError


def add(subparsers: Any) -> None:
    """Add the command and its own commands."""
    shards = subparsers.add_parser(
        "shards", help="build, index, inspect and verify WebDataset shards; make the demo data"
    )
    commands = shards.add_subparsers(dest="shards_command", required=True, metavar="COMMAND")
    pattern_help = "a folder, a glob, a range such as 'x-{000000..000003}.tar', or several separated by commas"

    index = commands.add_parser("index", help="build the indexes that training reads, and count the texts of a run")
    index.add_argument(
        "pattern",
        metavar="PATTERN|CONFIG",
        help=f"{pattern_help}; or a config (a shipped name or a YAML file): its shards are indexed, and the tokens of "
        "their texts counted",
    )
    index.add_argument("overrides", metavar="key=value", nargs="*", help="with a config: changes to it")
    index.add_argument("--cache-dir", help="put the indexes into this folder instead of next to the shards")
    index.add_argument(
        "--workers", type=positive, default=1, help="processes, each takes a shard at a time (default: 1)"
    )
    index.set_defaults(handler=about_files(_index))

    inspect = commands.add_parser("inspect", help="show what the shards hold")
    inspect.add_argument("pattern", metavar="PATTERN|CONFIG", help=f"{pattern_help}; or a config: {CONFIG_HELP}")
    inspect.add_argument("overrides", metavar="key=value", nargs="*", help=f"of a CONFIG: {OVERRIDE_HELP}")
    inspect.add_argument("--samples", type=whole, help="samples to print in full (default: 3), or of a page (20)")
    inspect.add_argument("--html", metavar="FILE", help="of a CONFIG: write a page with samples as training reads them")
    inspect.add_argument("--cache-dir", help="folder of the indexes, if they are not next to the shards")
    inspect.set_defaults(handler=about_files(shards_inspect.inspect))

    verify = commands.add_parser(
        "verify",
        help="read and decode every sample; exit code 1 if any is bad",
        description="Of a PATTERN every file is decoded. Of a CONFIG every sample is read as the run would read it,\n"
        "with its bounds, template, tokenizer and modules; exit code 1 if more are bad than\n"
        "data.max_bad_samples allows.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verify.add_argument("pattern", metavar="PATTERN|CONFIG", help=f"{pattern_help}; or a config: {CONFIG_HELP}")
    verify.add_argument("overrides", metavar="key=value", nargs="*", help=f"of a CONFIG: {OVERRIDE_HELP}")
    verify.add_argument("--cache-dir", help="folder of the indexes, if they are not next to the shards")
    verify.add_argument(
        "--workers", type=positive, default=2, help="threads, of a CONFIG processes that read samples (default: 2)"
    )
    verify.set_defaults(handler=about_files(shards_inspect.verify))

    shards_build.add(commands)

    demo = commands.add_parser("make-demo", help="make a small data set to try things on, without a download")
    demo.add_argument("out", metavar="OUT", help="folder to write")
    demo.add_argument(
        "--kind",
        choices=["digits", "digits_pairs", "mixed", "text", "video_digits"],
        default="digits",
        help="default: digits",
    )
    demo.add_argument(
        "--samples", type=positive, help="training samples (default: digits 12000, mixed 3000, videos 4000)"
    )
    demo.add_argument("--held-out", type=positive, help="held-out samples (default: digits 768, mixed 320, videos 512)")
    demo.add_argument("--seed", type=int, help="seed of the demo; the text demo has none (default: 0)")
    demo.set_defaults(handler=about_files(_make_demo))


def _index(args: argparse.Namespace) -> int:
    from data.index.find_shards import find_shards
    from data.indexed.find import is_indexed
    from data.order.sources import found_shards
    from mimo_train.config.compose import load
    from mimo_train.inputs.datasets import held_out_sets, training_sources

    if not args.overrides and not shards_inspect.is_config_name(args.pattern):
        if is_indexed(args.pattern):
            print(f"{args.pattern}: .bin and .idx files need no other index")
            return 0
        return _index_all(find_shards(args.pattern), args.cache_dir, args.workers)
    cfg = load(args.pattern, args.overrides, weights=False)
    if args.cache_dir:
        cfg.data.cache_dir = args.cache_dir
    sources = training_sources(cfg) + [held_out.source for held_out in held_out_sets(cfg) if not held_out.fraction]
    tars = [source for source in sources if source.shards and not is_indexed(source.shards)]
    paths = [path for source in tars for path in found_shards(source)]
    code = _index_all(list(dict.fromkeys(paths)), cfg.data.cache_dir or None, args.workers) if paths else 0
    return code or _count_texts(cfg, args.workers)


def _count_texts(cfg: Any, workers: int) -> int:
    from data.samples.shard_dataset import ShardDataset
    from data.samples.text_lengths import TextLengths
    from mimo_train.inputs.datasets import OneShard, build_dataset, tokenizer_of
    from mimo_train.inputs.padding import padding_of
    from mimo_train.layout.run import resolve
    from mimo_train.logging.console import CountBar

    if padding_of(resolve(cfg).cfg) is None:
        print(f"data.pad is {cfg.data.pad}: texts need not be counted")
        return 0
    dataset = build_dataset(cfg, tokenizer_of(cfg))
    if not isinstance(dataset, ShardDataset):
        print(f"the samples of .bin and .idx files have {cfg.data.sequence_length} tokens: nothing need be counted")
        return 0
    lengths = TextLengths(dataset)
    bar = CountBar("counting the tokens of texts", sum(dataset.samples_of(shard) for shard in lengths.missing()))
    counted = 0
    try:
        for done in lengths.build(OneShard(cfg), workers):
            counted += done.samples if done.here else 0
            bar.add(done.samples)
    finally:
        bar.close()
    lengths.serve()
    assert dataset.lengths is not None
    tokens = dataset.lengths.reshape(-1)  # of every answer
    print(
        f"{dataset.answers * counted} of {plural(len(tokens), 'text')} counted now; tokens of a text: "
        f"{tokens.mean():.1f} on average, longest {tokens.max()}, of data.sequence_length {cfg.data.sequence_length}"
    )
    return 0


def _index_all(paths: Sequence[Place], cache_dir: str | None, workers: int) -> int:
    from data.errors import DataError
    from data.index.catalogue import open_catalogue
    from mimo_train.logging.console import CountBar

    bar = CountBar("indexing shards", len(paths))
    try:
        catalogue = open_catalogue(paths, cache_dir, processes=workers, progress=bar.add, strict=False)
    finally:
        bar.close()
    indexes = []
    for number, path in enumerate(paths):
        try:
            index = catalogue.index(number)
        except DataError as error:
            print(f"error: {shown(str(error))}", file=sys.stderr)
            continue
        indexes.append(index)
        if len(index):
            bad = f", {index.num_bad} of them bad by their headers" if index.num_bad else ""
            print(f"{path}: {plural(len(index), 'sample')}{bad}")
        else:
            print(f"warning: {path}: no sample in it", file=sys.stderr)
    samples = sum(map(len, indexes))
    print(
        f"{len(indexes)} of {plural(len(paths), 'shard')} indexed, {plural(samples, 'sample')}, "
        f"{sum(index.num_bad for index in indexes)} of them bad by their headers; {shards_inspect.NOT_READ}"
    )
    if indexes and not samples:
        print(f"error: {plural(len(indexes), 'shard')} without any sample: a run cannot read them", file=sys.stderr)
    return 0 if samples and len(indexes) == len(paths) else 1


def _make_demo(args: argparse.Namespace) -> int:
    from data.demo.make import make_demo

    chosen = {"train_samples": args.samples, "held_out_samples": args.held_out, "seed": args.seed}
    parameters = {name: value for name, value in chosen.items() if value is not None}
    if args.kind == "text" and parameters:
        raise UserError("--samples, --held-out and --seed belong to the other demos; the text demo has a fixed size")
    out = make_demo(args.out, args.kind, **parameters)
    print(f"{out}: the shards are in {out / 'train'} and {out / 'held_out'}")
    return 0
