"""Announcing reads of remote shards, so that they are on their way together: a reading thread waits for one at a
time. Nothing is announced of files, whose reads do not wait for a network."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from data.outline import SampleOutline
from data.storage.url import Url

if TYPE_CHECKING:
    from data.dataset import Dataset


def expect_sample(dataset: Dataset, number: int, modules: Collection[str], *, text: bool) -> None:
    """Begin to read what these modules need of a sample, and, with `text`, all members that its record is made of.
    Raises what the index does."""
    outline = dataset.outline(number)
    if isinstance(dataset.shards[outline.shard], Url):
        _expect(dataset, outline, modules if not dataset.blind else (), text=text)


def expect_texts(dataset: Dataset, shard: int, rows: range) -> None:
    """Begin to read the records of some rows of a shard. Raises what the index does."""
    if isinstance(dataset.shards[shard], Url):
        for row in rows:
            _expect(dataset, dataset.outline_at(shard, row), (), text=True)


def _expect(dataset: Dataset, outline: SampleOutline, modules: Collection[str], *, text: bool) -> None:
    if outline.bad_reason is not None:
        return
    kinds = dict.fromkeys(spec.kind for spec in dataset.modules if spec.module in modules)
    members = [member for kind in kinds for member in outline.members[kind]]
    for member in (*members, *(outline.texts if text else ())):
        dataset.reader.expect(dataset.shards[outline.shard], member.offset, member.size, dataset.version(outline.shard))
