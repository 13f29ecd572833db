"""Data before the first step: demo shards, the step at which the data ends the run, and text lengths.

`train.epochs` sets the number of steps. `data.exhausted=stop` ends the run before a sample of a source is drawn a
second time. One rank counts the texts for all.
"""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from data.errors import DataError
from data.samples.protocol import Samples
from data.samples.shard_dataset import ShardDataset
from data.samples.text_lengths import Counted, TextLengths
from data.text_format import plural
from mimo_train.config.errors import ConfigError, UserError
from mimo_train.config.schema_train import TrainConfig
from mimo_train.flight.recorder import RECORDER
from mimo_train.inputs.datasets import OneShard, build_dataset, tokenizer_of
from mimo_train.inputs.mixture import too_short
from mimo_train.launch.processes import is_first_of_node
from mimo_train.layout.run import Run, all_made, length_of, steps_of_epochs, with_iters
from mimo_train.logging.console import CountBar
from mimo_train.parallel.collectives import agreed
from mimo_train.training.step.state import GlobalState, TrainState


def make_demo_shards(run: Run) -> None:
    """Generate the shards of `data.demo` if they are missing, on the first rank of each node. Collective.

    Raises:
        DataError: they cannot be made there; on every rank.
    """
    data = run.cfg.data
    if not data.demo:
        return
    from data.demo.make import make_demo

    folder = Path(data.shards).parent
    with agreed():
        try:
            if is_first_of_node(run.layout, dist.get_rank()):
                make_demo(folder, data.demo)
        except OSError as error:
            raise DataError(
                f"data.demo: cannot make the {data.demo} demo in {folder} ({error}): free space there, or set "
                "data.shards=FOLDER/train data.validation_shards=FOLDER/held_out for a FOLDER that can be written"
            ) from error


@dataclass(frozen=True)
class DataEnd:
    """The step at which the data ends a run."""

    step: int
    source: str
    """Source that gives its last sample; empty if there is only one."""
    samples: int
    train: TrainConfig
    """`train`, with its number of steps."""

    def __str__(self) -> str:
        source = f" of {self.source}" if self.source else ""
        return (
            f"data.exhausted=stop: the {plural(self.samples, 'sample')}{source} last until step {self.step} of "
            f"{length_of(self.train)}, where the run ends"
        )


def with_steps(run: Run) -> tuple[Run, Samples | None]:
    """Return the run with the steps of `train.epochs`, which schedules need, and its training samples; without that key
    the run unchanged and None. Collective."""
    if not run.cfg.train.epochs:
        return run, None
    RECORDER.to("index")
    with agreed():
        dataset = build_dataset(run.cfg, tokenizer_of(run.cfg))
    return with_iters(run, steps_of_epochs(run, len(dataset))), dataset


def data_end(run: Run, dataset: Samples, train_state: TrainState) -> DataEnd | None:
    """Return where the data ends the run early, if so. Raises ConfigError if a new run would have no step."""
    cfg = run.cfg
    if cfg.data.exhausted != "stop":
        return None
    ends = dataset.order.exhausted()
    assert ends is not None, "some source has a weight"
    source, numbers = ends
    step = train_state.step + run.batch.steps_within(numbers, train_state.consumed_train_samples)
    if step >= cfg.train.iters:
        return None
    name, size = dataset.sources[source].name, dataset.order.sizes[source]
    if not step:
        raise ConfigError([too_short(cfg, run.batch, size, name)])
    return DataEnd(step, name, size, cfg.train)


def decided_by(state: GlobalState) -> str:
    """Return the key that sets the number of steps."""
    if state.data_ends is not None:
        return "data.exhausted=stop"
    return "train.epochs" if state.cfg.train.epochs else "train.iters"


def nothing_left(state: GlobalState) -> str:
    """Return the message of a run that has no step left."""
    step = state.train_state.step
    if state.data_ends is not None:
        return (
            f"nothing to do: step {step} is done, and with data.exhausted=stop the next would draw a sample a second "
            "time. Set data.exhausted=repeat or choose a new run.dir"
        )
    return all_made(state.cfg.train, step)


ROUND = 20.0
"""Seconds of counting between two messages to the ranks that wait, so that no message times out."""


class PreparationStopped(UserError):
    """A rank was asked to end the run before its first step; raised on all ranks."""


def count_texts(run: Run, dataset: ShardDataset, should_stop: Callable[[], bool] = lambda: False) -> None:
    """Give a dataset the lengths of its texts. The first rank counts what is missing, then the first rank of each node
    that does not see its files. Collective over all ranks.

    Args:
        should_stop: returns True if this rank was asked to end the run; all ranks see it within ROUND seconds.

    Raises:
        UserError, DataError: as `TextLengths.build` does, on every rank.
        PreparationStopped: a rank was asked to end the run.
    """
    rank = dist.get_rank()
    for builds in (rank == 0, is_first_of_node(run.layout, rank)):
        work, unfinished = _Counting(run, dataset) if builds else None, True
        try:
            while unfinished:
                local: list[bool] = []
                with agreed(local) as everyones:
                    local += [work is not None and work.count(ROUND, should_stop), should_stop()]
                unfinished = any(unfinished for unfinished, _ in everyones)
                if unfinished and any(stops for _, stops in everyones):
                    raise PreparationStopped(
                        "the run was asked to end while the tokens of its texts were counted. Nothing is trained yet; "
                        "start it again, and the shards that were counted are not counted again"
                    )
        finally:
            if work is not None:
                work.close()
    with agreed():
        TextLengths(dataset).serve()


class _Counting:
    def __init__(self, run: Run, dataset: ShardDataset):
        self._run, self._dataset = run, dataset
        self._jobs: Generator[Counted] | None = None
        self._bar: CountBar | None = None

    def count(self, seconds: float, should_stop: Callable[[], bool]) -> bool:
        """Count for `seconds`, or until `should_stop`; returns True if anything is left to count."""
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
        """End the bar and the processes that count."""
        if self._bar is not None:
            self._bar.close()
        if self._jobs is not None:
            self._jobs.close()
