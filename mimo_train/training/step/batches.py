"""The samples that this rank reads, and the iterator that feeds the schedule."""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from data.loader import StepLoader
from data.order.packing import Packing
from data.order.step import Batching, Microbatch, Reader, StepBatch
from data.order.step_plan import Padding
from data.samples.protocol import Samples
from data.workers import GivesUp, WaitGivenUp, never
from mimo_train.config.errors import UserError
from mimo_train.config.parts import LANGUAGE
from mimo_train.flight.file_format import FORWARD
from mimo_train.flight.recorder import RECORDER
from mimo_train.layout.run import Run
from mimo_train.parallel.context import local_offsets
from mimo_train.parallel.device import to_device
from mimo_train.parallel.groups import RunGroups
from mimo_train.training.step.pipeline import Pipeline


def open_loader(
    run: Run,
    groups: RunGroups,
    dataset: Samples,
    *,
    consumed: int,
    steps: int,
    size_at: Callable[[int], int] | None = None,
    padding: Padding | Packing | None = None,
    workers: int | None = None,
    gives_up: GivesUp = never,
) -> StepLoader:
    """Open the loader of this rank for `steps` steps, starting at sample number `consumed`.

    Args:
        size_at: samples of the step that starts at a sample number; default: the full batch.
        padding: padding or packing of a dataset with counted texts; None: samples in order, in rows of
            `data.sequence_length`.
        workers: reading threads; None: `data.workers`.
        gives_up: see `StepLoader`.
    """
    # Later stages of an encoder read only the sizes of media.
    readers = [
        Reader(
            name,
            pgs.dp.rank(),
            pgs.dp.size(),
            by_items=run.layout.modules[name].balance == "images",
            pass_microbatches=run.layout.modules[name].pass_microbatches,
            sizes_only=name != LANGUAGE and pgs.pp.rank() > 0,
        )
        for name, pgs in groups.collections.items()
    ]
    return StepLoader(
        dataset,
        Batching(run.batch.global_batch_size, run.batch.microbatch_samples, size_at, run.batch.replicas, padding),
        readers,
        consumed_samples=consumed,
        workers=run.cfg.data.workers if workers is None else workers,
        limit=steps,
        gives_up=gives_up,
    )


def _row_tokens(microbatch: Microbatch | dict[str, Any]) -> torch.Tensor:
    """Return the tokens of each row without padding, at least 1 (a stand-in may have none), int64 [B]."""
    return torch.tensor(microbatch["lengths"]).clamp(min=1)


class Steps(Protocol):
    """Steps in order, as a `StepLoader` reads them."""

    @property
    def dataset(self) -> Samples:
        """The dataset that is read."""
        ...

    def __next__(self) -> StepBatch:
        """Return the next step. Raises StopIteration at the end, WaitGivenUp if this rank gave up waiting for it."""
        ...

    def close(self) -> None:
        """End the reading threads."""
        ...


class StepIterator:
    """Microbatches of one step at a time, on the device; `advance` moves on to the next step.

    Ranks exchange flags of bad samples, whose loss then counts nowhere. The one message of a step has the flags of the
    next step (`local_bad_samples`, `receive`). It also has the learned positions of each sample, for the weight of the
    router losses (`local_learned`).

    Attributes:
        ended_by: votes to end the run, if ranks agreed not to make the next step: a rank gave up waiting for its
            samples or, in an evaluation, voted.
        weighs: whether ranks exchange the learned positions of each sample.
        is_fresh: True until a microbatch of the current step is taken.
    """

    def __init__(
        self,
        loader: Steps,
        pipeline: Pipeline,
        *,
        trains: bool = False,
        learned_logits: bool = False,
        votes: Callable[[], tuple[bool, bool]] | None = None,
        samples: int | None = None,
    ):
        """Start reading the first step.

        Args:
            trains: the steps are training steps, whose message has the flags of the next step. An evaluation exchanges
                flags at every step.
            learned_logits: add `learned` to microbatches at the language model's last stage: positions with a loss in
                this rank's part of the text, int64 [places].
            votes: returns this rank's votes to end the run; at least one is set if its loader gave up a wait. None if
                no rank gives up waits. They belong to the next step; if a step is made meanwhile, its message sums them
                and it is the last.
            samples: number of samples that count; later ones have no loss. None: all.
        """
        self._loader, self._pipeline, self._trains = loader, pipeline, trains
        self._modules = "+".join(pipeline.groups.collections)
        self._votes, self._given_up, self._samples = votes, False, samples
        self.ended_by: tuple[bool, bool] | None = None
        self._position: int | None = None
        self._upcoming = self._read()
        self._current: StepBatch | None = None
        self._bad: torch.Tensor | None = None
        self._good = torch.ones(pipeline.batch.global_batch_size, 1, device=pipeline.device)
        self.weighs = pipeline.router_losses.active and trains
        self._received: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._waiting: deque[int] = deque()
        self.is_fresh = False
        self._finds_learned = learned_logits and pipeline.is_last_stage

    def advance(self) -> StepBatch | None:
        """Make the next step current and return it; None at the end, or if a rank gave up waiting for its samples.
        Collective over all ranks at the start, after a step of `train.skip_iters`, and at every step of an
        evaluation."""
        self._position = self.consumed_samples
        self._current = self._upcoming
        if self._current is None and not self._given_up:
            return None
        received, self._received = self._received, None
        flags = received[0] if received is not None else self._sum_of_flags()
        if self._current is None or self.ended_by is not None:
            self._current = None
            return None
        self._bad = flags
        self._good = (flags == 0).float()[:, None]
        if self._samples is not None:
            self._good[max(self._samples - self._current.first_sample, 0) :] = 0
        if self.weighs:
            learned = received[1] if received is not None else None
            if learned is None:
                learned = self._learned_of(self._current)
                dist.all_reduce(learned)
            counting = (learned[:-1] * (flags == 0)).sum()
            self._pipeline.router_losses.weigh(counting, learned[-1], self._current.plan.positions)
        self._upcoming = self._read()
        self.rewind()
        self.is_fresh = True
        return self._current

    @property
    def current(self) -> StepBatch:
        """The step that `advance` has moved to."""
        assert self._current is not None, "there is no current step: `advance` makes the next one current"
        return self._current

    @property
    def bad(self) -> torch.Tensor:
        """[global_batch_size], above 0 for bad samples of the current step; smaller steps use the first entries."""
        assert self._bad is not None, "there is no current step: `advance` makes the next one current"
        return self._bad

    @property
    def device(self) -> torch.device:
        """Device of the microbatches."""
        return self._pipeline.device

    @property
    def dataset(self) -> Samples:
        """The dataset, which maps a sample number to its shard and key."""
        return self._loader.dataset

    def rewind(self, chosen: Sequence[int] | None = None) -> None:
        """Restart the current step's microbatches: all, or those with the numbers in `chosen`."""
        step = self.current
        chosen = range(len(step.microbatches)) if chosen is None else chosen
        self._pipeline.shapes.follow(step, chosen)
        self._waiting = deque(chosen)

    @property
    def consumed_samples(self) -> int | None:
        """Position in the data: number of the first sample that no step has taken. None before the first step."""
        step = self._current
        return self._position if step is None else step.first_sample + (0 if self.is_fresh else step.size)

    def put_back(self) -> None:
        """Count the samples of the current step as not taken, because the step was not made."""
        self.rewind()
        self.is_fresh = True

    def __iter__(self) -> "StepIterator":
        return self

    def __next__(self) -> Microbatch:
        """Return the next microbatch of the current step, on the device. Raises StopIteration after the last one (see
        `rewind` and `advance`), UserError if no step is current."""
        with self._pipeline.stopwatch("data_wait"):
            if not self._waiting:
                if self._bad is None:
                    raise UserError(
                        "data_iterator: no step is current yet. Call its advance() before next(), or train_step, which "
                        "does. To look at samples use mimo_train.run_dataset.open_dataset"
                    )
                raise StopIteration("all microbatches of the step were taken: call advance() for the next step")
            index = self._waiting.popleft()
            self.is_fresh = False
            RECORDER.at(self._modules, FORWARD, index)
            microbatch: dict[str, Any] = self.current.microbatches[index]
            if self._finds_learned:
                language = self._pipeline.groups.collections[LANGUAGE]
                learned = local_offsets(microbatch["loss_mask"], language.cp.rank(), language.cp.size())
                # No layer takes an empty batch; the loss at this position is multiplied by 0.
                learned = learned if len(learned) else torch.zeros(1, dtype=torch.int64)
                microbatch = microbatch | {"learned": learned}
            if self._trains and self._pipeline.balances_experts and "lengths" in microbatch:
                tokens = torch.arange(microbatch["input_ids"].size(1))
                microbatch = microbatch | {"padding": tokens >= _row_tokens(microbatch)[:, None]}
            batch = Microbatch(to_device(microbatch, self._pipeline.device))
            if "loss_mask" in batch:
                # Samples that any rank flagged as bad have no loss.
                batch["loss_mask"] = batch["loss_mask"] * self._good_of(index, batch)
            if "answers" in batch:
                batch["answers"] = batch["answers"].masked_fill(batch["loss_mask"] == 0, -1)
            return batch

    def following(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the upcoming microbatches as read, with their numbers in the step: the rest of this step, and those of
        the next."""
        for index in self._waiting:
            yield index, self.current.microbatches[index]
        if self._upcoming is not None:
            yield from enumerate(self._upcoming.microbatches)

    def views(self, number: int) -> list[Iterator[dict[str, Any]]]:
        """Return an iterator over the current step's microbatches for each model chunk; they share the tensors."""
        return [map(Microbatch, view) for view in itertools.tee(self, number)]

    def local_bad_samples(self) -> list[int]:
        """Return 1 for each sample of the next step that this rank could not read, else 0."""
        return [] if self._upcoming is None else self._upcoming.bad.tolist()

    def local_learned(self) -> torch.Tensor:
        """Return the learned positions of each sample of the next step, and the tokens of its rows."""
        return self._learned_of(self._upcoming)

    def receive(self, bad_samples: torch.Tensor, learned: torch.Tensor | None) -> None:
        """Take the sums over ranks of `local_bad_samples` and `local_learned`, for the next `advance`."""
        self._received = bad_samples, learned

    def close(self) -> None:
        """End the reading threads."""
        self._loader.close()

    def _read(self) -> StepBatch | None:
        """Return the next step; None at the end, or if this rank gave up the wait: the current step is then the
        last."""
        with self._pipeline.stopwatch("data_wait"):
            try:
                return next(self._loader, None)
            except WaitGivenUp:
                self._given_up = True
                return None

    def _sum_of_flags(self) -> torch.Tensor:
        """Sum the current step's flags over ranks, and agree on the end of the run. Collective."""
        samples, step = self._pipeline.batch.global_batch_size, self._current
        flags = torch.zeros(samples + 3, dtype=torch.int64)
        if step is not None:
            flags[: step.size] = torch.from_numpy(step.bad)
        votes = self._votes() if self._votes is not None else (False, False)
        flags[samples:] = torch.tensor([self._given_up, *votes])
        flags = to_device(flags, self._pipeline.device)
        dist.all_reduce(flags)
        if self._votes is not None:
            given_up, signalled, late = map(bool, flags[samples:].tolist())
            ends = given_up or (not self._trains and (signalled or late))
            self.ended_by = (signalled, late) if ends else None
        return flags[:samples]

    def _learned_of(self, step: StepBatch | None) -> torch.Tensor:
        """Return the learned positions of each sample, or 1 if it has several answers, whose loss is one; then the
        tokens of all rows, [global_batch_size + 1]. One rank per replica counts."""
        pipeline, language = self._pipeline, self._pipeline.groups.collections.get(LANGUAGE)
        counts = torch.zeros(pipeline.batch.global_batch_size + 1, dtype=torch.float64)
        reads = language is not None and language.tp.rank() == language.cp.rank() == language.pp.rank() == 0
        if step is not None and reads:
            for microbatch in step.microbatches:
                places = microbatch["sample_numbers"] - step.first_sample
                counts[-1] += _row_tokens(microbatch).sum()
                if step.plan.packed:
                    mask = microbatch["loss_mask"][0].double()
                    counted = mask.split(step.plan.lengths_in_row(np.asarray(microbatch["sample_numbers"]), len(mask)))
                    counts[places] = torch.tensor([each.sum() for each in counted[: len(places)]], dtype=counts.dtype)
                else:
                    counts[places] = microbatch["loss_mask"].double().view(len(places), -1).sum(dim=1)
            if step.plan.answers > 1:
                counts[:-1].clamp_(max=1)
        return to_device(counts, pipeline.device)

    def answered(self) -> torch.Tensor:
        """Return how many samples of this rank's current step have a token with loss, 0-d; not for packed rows."""
        count = torch.zeros((), dtype=torch.int64, device=self.device)
        for index, microbatch in enumerate(self.current.microbatches):
            mask = to_device(microbatch["loss_mask"], self.device) * self._good_of(index, microbatch)
            count += (mask > 0).view(len(microbatch["sample_numbers"]), -1).any(dim=1).sum()
        return count

    def _good_of(self, index: int, batch: dict[str, Any]) -> torch.Tensor:
        """Return 1 where a loss counts, 0 in bad samples: [B, 1], or [1, T] of a packed row."""
        if not self.current.plan.packed:
            good = self._good[batch["sample_numbers"] - self.current.first_sample]
            return good.repeat_interleave(self.current.plan.answers, dim=0)
        numbers = self.current.microbatches[index]["sample_numbers"]
        lengths = self.current.plan.lengths_in_row(np.asarray(numbers), batch["loss_mask"].size(1))
        # Padding after the samples has no loss anyway: give it any place.
        places = torch.nn.functional.pad(numbers - self.current.first_sample, (0, len(lengths) - len(numbers)))
        of_positions = places.repeat_interleave(torch.tensor(lengths), output_size=sum(lengths))
        return self._good[to_device(of_positions, self._pipeline.device)].T
