"""Indexes of all remote shards of a run, before it begins."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from random import SystemRandom

from data.index import open_index
from data.storage.retry import RETRIES
from data.storage.url import Place, Url


def prepare(shards: Sequence[Place], cache_dir: str | os.PathLike[str] | None = None, retries: int = RETRIES) -> None:
    """Build the indexes of remote shards that are missing, several at a time. In any order, so that ranks of a machine,
    which all do so, seldom build the same one. Errors as of `open_index`."""
    remote = [shard for shard in shards if isinstance(shard, Url)]
    SystemRandom().shuffle(remote)
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda shard: len(open_index(shard, cache_dir, retries)), remote):
            pass
