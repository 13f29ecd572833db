"""The texts of a run are counted before its first step: on one rank for all, while the others wait."""

import time
from collections.abc import Callable, Generator

import torch.distributed as dist

from data.index.text_lengths import Counted
from data.pipeline import Dataset, TextLengths
from mimo_train.config.errors import UserError
from mimo_train.inputs.inputs import OneShard
from mimo_train.launch.processes import is_first_of_node
from mimo_train.layout.run import Run
from mimo_train.logging.count_bar import CountBar
from mimo_train.parallel.collective_errors import agreed

ROUND = 20.0
"""Seconds after which ranks that wait hear that counting goes on: however long it takes, no message waits for long."""


class CountingStopped(UserError):
    """A rank was asked to end the run while texts were counted; raised on all ranks."""


def count_texts(run: Run, dataset: Dataset, should_stop: Callable[[], bool] = lambda: False) -> None:
    """Give a dataset the lengths of its texts; what has not been counted yet is, on the first rank, and then on the
    first rank of each node that does not see the files of that one. Collective over all ranks.

    Args:
        should_stop: whether this rank was asked to end the run; all ranks see it within ROUND seconds.

    Raises:
        UserError, DataError: as `TextLengths.build` does, on every rank.
        CountingStopped: a rank was asked to end the run.
    """
    rank = dist.get_rank()
    for builds in (rank == 0, is_first_of_node(run.layout, rank)):
        work, unfinished = _Work(run, dataset) if builds else None, True
        try:
            while unfinished:
                own: list[bool] = []
                with agreed(own) as everyones:
                    own += [work is not None and work.go_on(ROUND, should_stop), should_stop()]
                unfinished = any(unfinished for unfinished, _ in everyones)
                if unfinished and any(stops for _, stops in everyones):
                    raise CountingStopped(
                        "the run was asked to end while the tokens of its texts were counted. Nothing is trained yet; "
                        "start it again, and the shards that were counted are not counted again"
                    )
        finally:
            if work is not None:
                work.close()
    with agreed():
        TextLengths(dataset).serve()


class _Work:
    """Counting, in rounds."""

    def __init__(self, run: Run, dataset: Dataset):
        self._run, self._dataset = run, dataset
        self._jobs: Generator[Counted] | None = None
        self._bar: CountBar | None = None

    def go_on(self, seconds: float, should_stop: Callable[[], bool]) -> bool:
        """Count for that long, or until `should_stop`; returns whether anything is left to do."""
        end = time.monotonic() + seconds
        if self._jobs is None:
            lengths = TextLengths(self._dataset)
            missing = lengths.missing()
            self._jobs = lengths.build(OneShard(self._run.cfg))
            if missing:
                total = sum(self._dataset.samples_of(shard) for shard in missing)
                self._bar = CountBar("counting the tokens of texts", total)
        for done in self._jobs:
            assert self._bar is not None, "something was missing"
            self._bar.add(done.samples)
            if time.monotonic() > end or should_stop():
                return True
        return False

    def close(self) -> None:
        """End the bar, and the processes that count."""
        if self._bar is not None:
            self._bar.close()
        if self._jobs is not None:
            self._jobs.close()
