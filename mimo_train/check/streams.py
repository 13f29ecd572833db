"""Shards that are read from beginning to end: the first samples, and what a run does without."""

from typing import TYPE_CHECKING, Any

from data.shown import plural, shown
from data.sources import Source
from mimo_train.check.findings import Report
from mimo_train.config.schema import ConfigContainer
from mimo_train.plan.inputs import build_dataset

if TYPE_CHECKING:
    from data.pipeline import StreamDataset

LOST = (
    "data.stream: every rank reads all shards, their media too, and keeps what it needs: as many times the bytes as "
    "there are ranks",
    "data.stream: samples stand in the order of their shards; each epoch has the shards in another order "
    "(data.shuffle), nothing else is shuffled: shuffle samples when shards are written",
    "data.stream: a run that continues first reads what it has passed, at most all shards once",
    "data.stream: rows have data.sequence_length tokens, padding included, and are not packed",
    "data.stream: how many samples there are is not known: no epochs, no held-out share, no mixture",
)
"""What is lost without an index, each a note."""


def open_stream(
    report: Report, cfg: ConfigContainer, source: Source, tokenizer: Any, most: int, rows: list
) -> tuple["StreamDataset", range]:
    """The samples, and the numbers of the first ones, `most` of them or those of one epoch, which are read now.

    Raises:
        DataError: shards cannot be opened or read.
    """
    from data.pipeline import StreamDataset
    from data.storage.command import Command

    dataset = build_dataset(cfg, tokenizer, shards=[source])
    assert isinstance(dataset, StreamDataset)
    commands = [shard for shard in dataset.shards if isinstance(shard, Command)]
    kind = plural(len(commands), "command") if commands else plural(len(dataset.shards), "shard")
    rows.append((source.key, shown(str(source.shards)), f"{kind}, read from beginning to end (data.stream)"))
    report.notes += LOST
    if commands or any("://" in str(shard) for shard in dataset.shards):
        report.notes.append(
            "data.stream: whether a command, or a web server, gives other samples than before is not seen when a run "
            "continues, but for their number in a shard"
        )
    try:
        dataset.plan_step(0, most)
    except BaseException:
        dataset.close()
        raise
    return dataset, range(dataset.epoch_end(most))
