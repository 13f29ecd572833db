"""`mimo-train shards build`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from data.text_format import plural
from mimo_train.commands.arguments import about_files, positive, whole
from mimo_train.config.errors import UserError


def add(commands: Any) -> None:
    """Add the command to those of `shards`."""
    build = commands.add_parser(
        "build",
        help="make shards of a LLaVA JSON, a CSV, a Hugging Face dataset, img2dataset's output, tars, speech, folders",
        description="Make shuffled WebDataset shards. The folder appears when all are complete.",
    )
    build.add_argument(
        "source",
        metavar="SOURCE",
        help="a JSON, JSONL, CSV or TSV file of records; parquet or Arrow files, or the folder of a Hugging Face "
        "dataset; a folder of tars; a folder with images, videos and audio next to captions or records of the same "
        "name; a folder of LibriSpeech, or a data directory of Kaldi",
    )
    build.add_argument("--to", metavar="FOLDER", required=True, help="folder to write: train/ and held_out/ in it")
    build.add_argument(
        "--media", metavar="FOLDER", help="folder of the files that records name (default: next to the records)"
    )
    build.add_argument("--split", default="", help="of a dataset in several splits (default: train)")
    build.add_argument(
        "--columns",
        metavar="WHAT=COLUMN",
        nargs="+",
        default=[],
        help="which column is what: image, video, audio, caption, question, answer, label, text, conversations, "
        "messages, system, tools; of preferences prompt, chosen, rejected, completion; of a segment "
        "start, end, duration. File names may join columns, such as video={page_dir}/{videoid}.mp4",
    )
    build.add_argument(
        "--quoted", action="store_true", help="quotes enclose cells of a TSV, as in a CSV (default: they are text)"
    )
    build.add_argument(
        "--whole-files",
        action="store_true",
        help="do not cut recordings to the segments of records (start and end, or offset and duration, seconds)",
    )
    build.add_argument("--question", default="", help="asked of every sample that has a caption, such as 'Transcribe.'")
    build.add_argument("--held-out", type=whole, default=0, help="samples to set aside for evaluation (default: 0)")
    build.add_argument("--samples-per-shard", type=positive, default=1000, help="at most (default: 1000)")
    build.add_argument("--shard-mb", type=positive, default=1000, help="megabytes of a shard, at most (default: 1000)")
    order = build.add_mutually_exclusive_group()
    order.add_argument("--seed", type=int, default=0, help="of the order of samples (default: 0)")
    order.add_argument("--no-shuffle", action="store_true", help="leave samples in the order of the source")
    build.add_argument("--skip-bad", action="store_true", help="leave out records that cannot be used, and list them")
    build.add_argument(
        "--max-bad",
        type=float,
        help="most records that --skip-bad may leave out, a number or a fraction below 1 (default: 0.1)",
    )
    build.add_argument("--workers", type=positive, default=1, help="processes (default: 1)")
    build.set_defaults(handler=about_files(_build))


def _build(args: argparse.Namespace) -> int:
    from data.build.build import LEFT_OUT, Settings, build_shards
    from data.build.find import find_source
    from data.rows.samples import Columns
    from mimo_train.logging.console import CountBar

    if args.max_bad is not None and not args.skip_bad:
        raise UserError("--max-bad says how many records --skip-bad may leave out: give --skip-bad too")
    columns = Columns.parse(args.columns, args.question, args.quoted, args.whole_files)
    media = Path(args.media) if args.media else None
    source = find_source(Path(args.source), columns, media, args.split)
    settings = Settings(
        held_out=args.held_out,
        per_shard=args.samples_per_shard,
        shard_bytes=args.shard_mb * 1_000_000,
        seed=None if args.no_shuffle else args.seed,
        skip_bad=args.skip_bad,
        max_bad=0.1 if args.max_bad is None else args.max_bad,
    )
    bars, to = dict[str, CountBar](), Path(args.to)

    def progress(step: str, more: int, total: int | None) -> None:
        if step not in bars:
            for bar in bars.values():
                bar.close()
            bars[step] = CountBar(step, total)
        bars[step].add(more)

    try:
        built = build_shards(source, to, settings, workers=args.workers, progress=progress)
    finally:
        for bar in bars.values():
            bar.close()
    for note in built.notes:
        print(f"note: {note}", file=sys.stderr)
    if built.left_out:
        print(f"left out: {plural(built.left_out, 'record')} that cannot be used, see {to / LEFT_OUT}", file=sys.stderr)
    for part, samples in built.samples.items():
        print(f"{to / part}: {plural(samples, 'sample')} in {plural(built.shards[part], 'shard')}")
    numbers = {"image": "image", "video": "video", "audio": "audio clip"}
    print(f"{to}: {', '.join(plural(built.media[kind], name) for kind, name in numbers.items())}")
    return 0
