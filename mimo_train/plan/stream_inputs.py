"""Config -> samples of shards that are read from beginning to end (`data.stream`)."""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from data.media.ground import colour_of
from data.shown import shown
from data.storage.command import Command
from mimo_train.config.schema import ConfigContainer

if TYPE_CHECKING:
    from data.pipeline import Source, StreamDataset

KEY = "data.shards"


def stream_dataset(cfg: ConfigContainer, tokenizer: Any, source: Source, **of_media: Any) -> StreamDataset:
    """The training samples, in the order of a stream. Commands that will be run are said first.

    Args:
        of_media: further arguments, those that shards with an index have too.

    Raises:
        DataError: no shards, or one that cannot be opened.
    """
    from data.pipeline import StreamDataset

    data = cfg.data
    dataset = StreamDataset(
        source,
        tokenizer=tokenizer,
        sequence_length=data.sequence_length,
        seed=cfg.run.seed,
        shuffle=data.shuffle,
        blind=data.blind,
        max_bad_samples=int(data.max_bad_samples),
        read_retries=data.read_retries,
        ground=colour_of(data.background),
        skip_null=data.null_captions == "skip",
        **of_media,
    )
    say_commands([shard for shard in dataset.shards if isinstance(shard, Command)], source.key)
    return dataset


def say_commands(commands: list[Command], key: str) -> None:
    """Say on standard error which commands are about to be run; on rank 0, and once.

    Args:
        key: of the config, that names them.
    """
    if commands and os.environ.get("RANK", "0") == "0":
        more = f", and {len(commands) - 1} more like it" if len(commands) > 1 else ""
        _say(f"{key} names a command that every rank runs in a shell: {commands[0].text}{more}")


@cache
def _say(line: str) -> None:
    sys.stderr.write(f"notice: {shown(line)}\n")
    sys.stderr.flush()
