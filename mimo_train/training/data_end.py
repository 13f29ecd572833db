"""Where the data ends a run: the steps of `train.epochs`, and with `data.exhausted=stop` the last step before a sample
of a source would be drawn a second time."""

from dataclasses import dataclass

from data.pipeline import Samples
from data.text_format import plural
from mimo_train.config.errors import ConfigError
from mimo_train.config.schema_train import TrainConfig
from mimo_train.flight.recorder import RECORDER
from mimo_train.inputs.inputs import build_dataset, tokenizer_of
from mimo_train.inputs.mixture import too_short
from mimo_train.layout.run import Run, all_made, length_of, steps_of_epochs, with_iters
from mimo_train.parallel.collective_errors import agreed
from mimo_train.training.step.state import GlobalState, TrainState


@dataclass(frozen=True)
class DataEnd:
    """Where the data ends a run."""

    step: int
    source: str
    """Which gives its last sample, empty where there is only one."""
    samples: int
    train: TrainConfig
    """`train`, with its number of steps."""

    def __str__(self) -> str:
        of = f" of {self.source}" if self.source else ""
        return (
            f"data.exhausted=stop: the {plural(self.samples, 'sample')}{of} last until step {self.step} of "
            f"{length_of(self.train)}, where the run ends"
        )


def with_steps(run: Run) -> tuple[Run, Samples | None]:
    """The run with the steps of `train.epochs`, which schedules are built by, and its training samples; without that
    key the run as it is. Collective."""
    if not run.cfg.train.epochs:
        return run, None
    RECORDER.to("index")
    with agreed():
        dataset = build_dataset(run.cfg, tokenizer_of(run.cfg))
    return with_iters(run, steps_of_epochs(run, len(dataset))), dataset


def data_end(run: Run, dataset: Samples, train_state: TrainState) -> DataEnd | None:
    """Where the data ends the run, if that is before its last step.

    Raises:
        ConfigError: a new run would have no step.
    """
    cfg = run.cfg
    if cfg.data.exhausted != "stop":
        return None
    source, numbers = dataset.exhausted()
    step = train_state.step + run.batch.steps_within(numbers, train_state.consumed_train_samples)
    if step >= cfg.train.iters:
        return None
    name, size = dataset.sources[source].name, dataset.source_sizes[source]
    if not step:
        raise ConfigError([too_short(cfg, run.batch, size, name)])
    return DataEnd(step, name, size, cfg.train)


def decided_by(state: GlobalState) -> str:
    """The key that gives the number of steps."""
    if state.data_ends is not None:
        return "data.exhausted=stop"
    return "train.epochs" if state.cfg.train.epochs else "train.iters"


def nothing_left(state: GlobalState) -> str:
    """What a run is told that has made its last step before."""
    step = state.train_state.step
    if state.data_ends is not None:
        return (
            f"nothing to train: step {step} was made, and with data.exhausted=stop the next would draw a sample a "
            "second time; set "
            "data.exhausted=repeat, or give another run.dir"
        )
    return all_made(state.cfg.train, step)
