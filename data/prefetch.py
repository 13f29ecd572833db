"""Announcing reads, so that they are on their way together: a reading thread waits for one at a time. Of remote shards
neighbours come in one read; of files the system is told, which then reads what it does not have in memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from data.samples.sample_meta import SampleOutline
from data.storage.files import ShardVersion
from data.storage.url import Place, Url

if TYPE_CHECKING:
    from data.samples.dataset import Dataset

Wanted = tuple[int, Collection[str], bool]
"""Sample number, modules that need media of it, and whether all members that its record is made of are needed."""


def expect_samples(dataset: Dataset, wanted: Iterable[Wanted]) -> None:
    """Begin to read what is needed of samples. Raises what the index does."""
    dataset.reader.expect(
        one
        for number, modules, text in wanted
        for one in _ranges(dataset, dataset.outline(number), modules if not dataset.blind else (), text=text)
    )


def expect_texts(dataset: Dataset, shard: int, rows: range) -> None:
    """Begin to read the records of some rows of a shard. Raises what the index does."""
    if isinstance(dataset.shards[shard], Url):
        outlines = (dataset.outline_at(shard, row) for row in rows)
        dataset.reader.expect(one for outline in outlines for one in _ranges(dataset, outline, (), text=True))


def _ranges(
    dataset: Dataset, outline: SampleOutline, modules: Collection[str], *, text: bool
) -> Iterator[tuple[Place, int, int, ShardVersion]]:
    shard = dataset.shards[outline.shard]
    if outline.bad_reason is not None:
        return
    kinds = dict.fromkeys(spec.kind for spec in dataset.modules if spec.module in modules)
    # Once each: of a video there are many pictures.
    members = {member.offset: member for kind in kinds for member in outline.members[kind]}.values()
    version = dataset.version(outline.shard)
    for member in (*members, *(outline.texts if text else ())):
        yield shard, member.offset, member.size, version
