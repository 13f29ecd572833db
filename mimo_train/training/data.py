"""Data of a run: which samples this rank reads, and the iterator that feeds the schedule."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from data.pipeline import Batching, Dataset, Reader, StepBatch, StepLoader
from mimo_train.config import LANGUAGE, ConfigContainer
from mimo_train.groups import RunGroups
from mimo_train.layout import RunLayout
from mimo_train.pipeline import Pipeline


def readers_of(groups: RunGroups) -> list[Reader]:
    """This rank's part of every module it holds: its data-parallel slice."""
    return [Reader(name, pgs.dp.rank(), pgs.dp.size()) for name, pgs in groups.collections.items()]


def open_loader(
    cfg: ConfigContainer, layout: RunLayout, groups: RunGroups, dataset: Dataset, *, consumed: int, steps: int
) -> StepLoader:
    """The loader of this rank from sample number `consumed` on, for `steps` steps."""
    return StepLoader(
        dataset,
        Batching(layout.global_batch_size, layout.microbatch_samples),
        readers_of(groups),
        consumed_samples=consumed,
        workers=cfg.data.workers,
        limit=steps,
    )


class StepIterator:
    """Microbatches of one step at a time, on the device; `advance` moves on to the next step.

    A rank that cannot read a sample tells the others, so that its loss counts nowhere. The flags of the next step
    travel with the token count at the end of this one (`Pipeline.step_flags`), so that they cost no message.
    """

    def __init__(self, loader: StepLoader, pipeline: Pipeline, *, forward_only: bool = False):
        self._loader, self._pipeline, self._forward_only = loader, pipeline, forward_only
        self._language = pipeline.groups.collections.get(LANGUAGE)
        self._upcoming: StepBatch | None = next(loader, None)
        self.current: StepBatch | None = None
        self.bad: torch.Tensor | None = None
        """int64 [global_batch_size]: above 0 where any rank found the sample of the current step bad."""
        self._microbatches: Iterator[dict[str, Any]] = iter(())

    def advance(self) -> StepBatch | None:
        """Make the next step the current one; None when there is no more. Collective over all ranks at the start, and
        at every step of an evaluation."""
        self.current = self._upcoming
        if self.current is None:
            return None
        flags = self._pipeline.summed_flags if self.bad is not None and not self._forward_only else None
        if flags is None:
            flags = self._flags_of(self.current)
            dist.all_reduce(flags)
        self.bad = flags
        self._upcoming = next(self._loader, None)
        if not self._forward_only:
            self._pipeline.step_flags = self._flags_of(self._upcoming)
        self.rewind()
        return self.current

    def rewind(self) -> None:
        """Start the current step's microbatches again."""
        self._pipeline.plan.begin(self.current.token_counts)
        self._microbatches = iter(enumerate(self.current.microbatches))

    def __iter__(self):
        return self

    def __next__(self) -> dict[str, Any]:
        index, microbatch = next(self._microbatches)
        batch = _to_device(microbatch, self._pipeline.device)
        if "loss_mask" in batch:
            batch["loss_mask"] = batch["loss_mask"] * self._good(index)[:, None]
        return batch

    def close(self) -> None:
        """End the reading threads."""
        self._loader.close()

    def _flags_of(self, step: StepBatch | None) -> torch.Tensor:
        size = self._pipeline.layout.global_batch_size
        if step is None:
            return torch.zeros(size, dtype=torch.int64, device=self._pipeline.device)
        return torch.from_numpy(step.bad).to(self._pipeline.device, torch.int64)

    def _good(self, microbatch: int) -> torch.Tensor:
        """1.0 for each of this language rank's samples of a microbatch that no rank found bad, else 0.0."""
        layout = self._pipeline.layout
        first = microbatch * layout.microbatch_samples + self._language.dp.rank() * layout.micro_batch_size
        return (self.bad[first : first + layout.micro_batch_size] == 0).float()


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: _to_device(item, device) for key, item in value.items()}
    if isinstance(value, list):
        return [_to_device(item, device) for item in value]
    return value
