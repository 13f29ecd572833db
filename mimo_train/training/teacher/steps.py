"""The steps of a student: its microbatches, and a teacher's hidden states of their learned tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from data.indexed.dataset import TokenDataset
from data.loader import StepLoader
from data.order.step import Microbatch, StepBatch
from data.samples.protocol import Samples
from mimo_train.config.parts import LANGUAGE
from mimo_train.inputs.datasets import HeldOutSet, build_dataset
from mimo_train.inputs.padding import padding_of, padding_of_documents
from mimo_train.models.output.divergence import Lesson
from mimo_train.parallel.context import chunks_of, local_offsets
from mimo_train.parallel.device import to_device
from mimo_train.training.step.batches import StepIterator, open_loader
from mimo_train.training.step.forward_step import LESSON
from mimo_train.training.teacher.exchange import texts_of
from mimo_train.training.teacher.model import Teacher


@dataclass(frozen=True, repr=False)
class TaughtStep(StepBatch):
    """A step of the student, with the teacher's step of the same samples."""

    teacher: StepBatch


class TaughtLoader:
    """Reads the steps of both models. A sample that one of them cannot read is bad."""

    def __init__(self, student: StepLoader, teacher: StepLoader):
        self._loaders, self.dataset = (student, teacher), student.dataset

    def __next__(self) -> TaughtStep:
        student, teacher = self._loaders
        step, taught = next(student), next(teacher)
        assert (step.first_sample, step.size) == (taught.first_sample, taught.size), "both read one order of samples"
        values = {field.name: getattr(step, field.name) for field in fields(step)}
        return TaughtStep(**values | {"bad": step.bad | taught.bad}, teacher=taught)

    def close(self) -> None:
        """End the reading threads."""
        for loader in self._loaders:
            loader.close()


class TaughtSet:
    """The samples of a training or held-out set, as the teacher reads them."""

    def __init__(self, teacher: Teacher, student: Samples, held_out: HeldOutSet | None = None):
        """`student` are the same samples as the student reads them; it counts the bad samples of both."""
        self._teacher = teacher
        self.samples = build_dataset(teacher.samples, teacher.parts.tokenizer, held_out=held_out)
        self.samples.bad_samples = student.bad_samples
        cfg = teacher.run.cfg
        self.padding = padding_of(cfg)
        """As the student's set has it."""
        if held_out is not None:
            apart = cfg.data.separate_documents and isinstance(self.samples, TokenDataset)
            self.padding = padding_of_documents(cfg) if apart else None

    def steps(self, loader: StepLoader, reading: Mapping[str, Any], **options: Any) -> "TaughtSteps":
        """Return an iterator over the student's steps. `reading` has the options of `open_loader`, except padding;
        `options` are those of `StepIterator`."""
        run, groups = self._teacher.run, self._teacher.parts.pipeline.groups
        taught = open_loader(run, groups, self.samples, padding=self.padding, **reading)
        return TaughtSteps(self._teacher, TaughtLoader(loader, taught), **options)


class TaughtSteps(StepIterator):
    """Adds a `Lesson` to the microbatches of the student's last stage. The teacher runs when a step becomes current,
    before the student's first microbatch. On ranks of its own it runs the next training step while the student trains.
    """

    def __init__(self, teacher: Teacher, loader: TaughtLoader, **options: Any):
        self._teacher = teacher
        self._rows: torch.Tensor | None = None
        self._starts: dict[int, int] = {}
        self._ahead: tuple[StepBatch, dict[int, torch.Tensor]] | None = None
        super().__init__(loader, teacher.student.pipeline, **options | {"learned_logits": True})
        if self._trains and teacher.is_apart and not self._pipeline.model:
            self._pipeline.work_ahead(lambda: None, self._teach_ahead)

    def advance(self) -> StepBatch | None:
        step = super().advance()
        if isinstance(step, TaughtStep):
            with self._pipeline.stopwatch("forward_backward"):
                ahead, self._ahead = self._ahead, None
                hidden = ahead[1] if ahead is not None and ahead[0] is step else None
                self._rows, self._starts = self._teacher.teach(step, step.teacher, self.bad, self.dataset, hidden)
        return step

    def _teach_ahead(self) -> None:
        step = self._upcoming
        if isinstance(step, TaughtStep) and (self._ahead is None or self._ahead[0] is not step):
            self._ahead = step, self._teacher.hidden_states(step.teacher)

    def __next__(self) -> Microbatch:
        index = self._waiting[0] if self._waiting else None
        batch = super().__next__()
        if index is not None and self._pipeline.is_last_stage:
            head, rows = self._teacher.head, self._rows
            assert head is not None and rows is not None, "the teacher has run before the student"
            numbers = to_device(self._rows_of(index), rows.device)
            batch[LESSON] = Lesson(head, rows.index_select(0, numbers))
        return batch

    def _rows_of(self, index: int) -> torch.Tensor:
        """Return the row of each position with logits in this rank's part of a microbatch, int64 on the host."""
        microbatch, language = self.current.microbatches[index], self._pipeline.groups.collections[LANGUAGE]
        places = (microbatch["sample_numbers"] - self.current.first_sample).tolist()
        mask = microbatch["loss_mask"]
        rows = np.zeros(mask.numel(), dtype=np.int64)
        learned = np.flatnonzero(mask.numpy() > 0)
        counts = [int(each.sum()) for _, each in texts_of(microbatch, self.current.plan)]
        # Bad samples have no row, and their loss does not count: they take the first one.
        starts = [self._starts.get(place) for place in places]
        rows[learned] = np.concatenate(
            [
                learned[:0],  # a packed row may be padding alone
                *(
                    np.arange(count) + start if start is not None else np.zeros(count, dtype=np.int64)
                    for count, start in zip(counts, starts, strict=True)
                ),
            ]
        )
        cp, rank = language.cp.size(), language.cp.rank()
        parts = torch.from_numpy(rows).view(len(mask), 2 * cp, -1) if cp > 1 else torch.from_numpy(rows)
        local = parts[:, list(chunks_of(rank, cp))].flatten() if cp > 1 else parts
        offsets = local_offsets(mask, rank, cp)
        return local[offsets] if len(offsets) else local[:1]
