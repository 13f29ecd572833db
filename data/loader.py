"""The step loader: read one rank's optimizer steps in threads; the worker count does not affect their order.

`consumed_samples` is the whole state. Bad samples are counted when a step is returned, not when it is read ahead, so
that a run always ends at the same step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from data.collate import collate, collate_media, collate_packed
from data.errors import DataError
from data.order.load_balance import routes_of
from data.order.step import LANGUAGE, Batching, Microbatch, Reader, StepBatch, StepSamples, TextSample
from data.order.step_plan import Share, StepPlan
from data.samples.bad_samples import BadSample
from data.samples.media_spec import MediaInput
from data.samples.protocol import MEDIA, ItemFeatures, MicrobatchMedia, Samples
from data.workers import GivesUp, ReadingThreads, Wait, WaitGivenUp, each, never

_STEPS_AHEAD = 2
_TOGETHER = 4  # maximum samples of a task


class StepLoader:
    """Iterator over steps. Use it as a context manager, or call `close`.

    readers: one for each module that this rank reads; may be empty (such a rank gets only numbers and counts).
    workers: threads, which read two steps ahead; 0 reads in the caller. limit: steps to return, None = endless.
    gives_up: polled while `next` waits for samples. If it returns True, `next` raises WaitGivenUp without waiting for
    threads, see `data.workers`. `next` raises a worker's error unchanged: TooManyBadSamples, ShardError, ...
    With `Batching.padding` the dataset requires lengths (`TextLengths.serve`).
    """

    def __init__(
        self,
        dataset: Samples,
        batching: Batching,
        readers: Sequence[Reader],
        *,
        consumed_samples: int = 0,
        workers: int = 2,
        limit: int | None = None,
        gives_up: GivesUp = never,
    ) -> None:
        assert consumed_samples >= 0 and workers >= 0, (consumed_samples, workers)
        modules = {LANGUAGE, *(item.module for item in dataset.modules)}
        names = [reader.module for reader in readers]
        assert len(set(names)) == len(names) and modules.issuperset(names), (names, modules)
        self._language = next((reader for reader in readers if reader.module == LANGUAGE), None)
        if self._language and batching.padding is None:
            batching = replace(batching, replicas=self._language.dp_size)
        assert self._language is None or self._language.dp_size == batching.replicas, (self._language, batching)
        self._dataset, self._batching, self._limit = dataset, batching, limit
        assert all(reader.by_items or batching.microbatch_samples % reader.dp_size == 0 for reader in readers), readers
        self._readers = list(readers)
        self._sizes_only = {reader.module for reader in readers if reader.sizes_only}
        self._fields = {item.module: item.field for item in dataset.modules} | dict.fromkeys(self._sizes_only, "sizes")
        self._tiled = {item.module for item in dataset.modules if item.canvas} - self._sizes_only
        self._next, self._issued, self._closed = consumed_samples, 0, False
        self._gives_up = gives_up
        self._given_up, self._wait = False, Wait(gives_up)
        self._workers = workers
        self._threads = ReadingThreads(workers) if workers else None
        self._pending: deque[_Step] = deque()

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        if self._closed:
            raise RuntimeError("this StepLoader is closed")
        self._wait = Wait(self._gives_up)
        try:
            self._issue_to(_STEPS_AHEAD)
            if not self._pending:
                raise StopIteration
            step = self._pending.popleft()
            self._issue_to(_STEPS_AHEAD)  # refill the free slot
            return self._assemble(step)
        except StopIteration:
            raise
        except BaseException as error:
            self._given_up = isinstance(error, WaitGivenUp)
            self.close()
            raise

    def __enter__(self) -> StepLoader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def dataset(self) -> Samples:
        """The dataset that is read."""
        return self._dataset

    def close(self) -> None:
        """Drop what was read ahead, and wait for a while for the threads to end. May be called twice. It does not wait
        for threads that `next` has given up."""
        self._closed = True
        self._pending.clear()
        if self._threads is not None:
            self._threads.close(waits=not self._given_up)

    def _issue_to(self, steps: int) -> None:
        # Without threads, samples are read when the step is assembled.
        while len(self._pending) < steps and (self._limit is None or self._issued < self._limit):
            size = self._batching.size(self._next)
            self._pending.append(self._issue(self._next, size))
            self._next += size
            self._issued += 1

    def _issue(self, first: int, step_size: int) -> _Step:
        """Submit all samples of a step to the workers; each reader's samples are in order."""
        samples = self._dataset.plan_step(first, step_size)
        length = self._dataset.sequence_length
        plan = self._batching.plan(first, step_size, samples.lengths, length, samples.documents, self._dataset.answers)
        wanted = self._wanted(plan, samples)
        numbers = [
            {module: {each.number: each.items for each in of_module} for module, of_module in of_microbatch.items()}
            for of_microbatch in wanted
        ]
        if self._dataset.is_remote:
            self._expect(numbers)  # before a thread can read it: late announcements are read twice
        return _Step(
            plan,
            samples,
            numbers,
            texts=[self._submit(self._read_text, of_modules.pop(LANGUAGE, ())) for of_modules in wanted],
            media=[
                {
                    module: self._submit(partial(self._read_media, module), of_module)
                    for module, of_module in of_modules.items()
                }
                for of_modules in wanted
            ],
        )

    def _expect(self, numbers: Sequence[dict[str, dict[int, list[int]]]]) -> None:
        """Start all reads of a step, since a reading thread waits for one at a time."""
        # Some modules need only sizes, and features of others may be known already.
        without = {LANGUAGE, *self._sizes_only, *self._dataset.lookups}
        with suppress(DataError):  # the read itself will raise it
            self._dataset.expect_samples(
                (number, {} if module in without else {module: items}, module == LANGUAGE)
                for of_microbatch in numbers
                for module, of_samples in of_microbatch.items()
                for number, items in of_samples.items()
            )

    def _wanted(self, plan: StepPlan, samples: StepSamples) -> list[dict[str, list[_Wanted]]]:
        """Return what this rank reads: microbatch -> module -> samples."""
        wanted: list[dict[str, list[_Wanted]]] = [{} for _ in plan.shares]
        for reader in self._readers:
            name, rank = reader.module, reader.dp_rank
            if reader is self._language:
                for of_microbatch, shares in zip(wanted, plan.shares, strict=True):
                    numbers = (plan.first + shares[rank].places).tolist()
                    of_microbatch[name] = [_Wanted(number, [], []) for number in numbers]
                continue
            routes = routes_of(samples.media[name], plan, reader.dp_size, reader.by_items, reader.pass_microbatches)
            for of_microbatch, of_items in zip(wanted, routes, strict=True):
                items, of_samples = of_items.items[of_items.sources == rank], dict[int, _Wanted]()
                for place, number, rows in zip(
                    items.places.tolist(), items.numbers.tolist(), items.tokens.tolist(), strict=True
                ):
                    sample = of_samples.setdefault(place, _Wanted(plan.first + place, [], []))
                    sample.items.append(number)
                    sample.rows.append(rows)
                of_microbatch[name] = [*of_samples.values()]
        return wanted

    def _submit(self, work: Callable[[_Wanted], Any], wanted: Sequence[_Wanted]) -> Callable[[], list[Any]]:
        if self._threads is None:
            return lambda: [self._read_now(work, sample) for sample in wanted]
        # Submitting a task costs as much as reading a short text, but every thread should get one.
        size = max(1, min(_TOGETHER, len(wanted) // self._workers))
        parts = [wanted[at : at + size] for at in range(0, len(wanted), size)]
        tasks = [self._threads.submit(each, work, part) for part in parts]
        return lambda: [result for task in tasks for result in self._wait.result_of(task)]

    def _read_now(self, work: Callable[[_Wanted], Any], sample: _Wanted) -> Any:
        self._wait.look()  # between two reads of the caller's own thread
        return work(sample)

    def _assemble(self, step: _Step) -> StepBatch:
        plan, bad_samples = step.plan, dict[int, BadSample]()
        microbatches = []
        for at, numbers in enumerate(step.numbers):
            texts = step.texts[at]()
            media = {module: results() for module, results in step.media[at].items()}
            of_media = [read.bad for reads in media.values() for read in reads]
            for bad_sample in (*(bad_sample for _, bad_sample in texts), *of_media):
                if bad_sample is not None:
                    bad_samples.setdefault(bad_sample.number, bad_sample)
            of_samples = step.samples.tokens
            microbatches.append(self._microbatch(plan, at, numbers, texts, media, bad_samples, of_samples))
        bad = np.zeros(plan.size, dtype=bool)
        for number in sorted(bad_samples):
            bad[number - plan.first] = True
            self._dataset.bad_samples.record(bad_samples[number])
        samples = step.samples
        tokens, loads, pairs = (
            {module: [values[places].tolist() for places in plan.places] for module, values in of.items()}
            for of in (samples.tokens, samples.loads, samples.pairs)
        )
        return StepBatch(plan, microbatches, step.numbers, tokens, loads, pairs, bad, samples.media)

    def _microbatch(
        self,
        plan: StepPlan,
        at: int,
        numbers_read: dict[str, dict[int, list[int]]],
        texts: list[tuple[TextSample, BadSample | None]],
        media: dict[str, list],
        bad: Container[int],
        counts: dict[str, np.ndarray],
    ) -> Microbatch:
        numbers = [*(numbers_read[LANGUAGE] if LANGUAGE in numbers_read else next(iter(numbers_read.values()), ()))]
        batch = Microbatch(sample_numbers=torch.tensor(numbers, dtype=torch.int64))
        if self._language:
            samples = [self._planned(plan, *read) for read in texts]
            # A sample whose image failed on this rank must not be learned either.
            samples = [sample.without_loss() if sample.number in bad else sample for sample in samples]
            share = plan.shares[at][self._language.dp_rank]
            texts_of_samples = [text for sample in samples for text in sample.answers]
            if plan.packed:
                lengths = plan.lengths_of_answers(share.places).tolist()
                batch |= collate_packed(texts_of_samples, lengths, share.length, self._dataset.tokenizer.pad_id)
            else:
                batch |= collate(texts_of_samples, share.length)
            rows = np.array(numbers, dtype=np.int64)
            if len(self._dataset.sources) > 1:
                sources = np.repeat(self._dataset.order.sources(rows), plan.answers)
                batch["sources"] = torch.from_numpy(plan.of_tokens(sources, share))
            if self._dataset.keep_text:
                batch["questions"] = [text.questions for text in texts_of_samples]
            if plan.answers > 1:
                batch |= self._compared(plan, share, samples, batch["loss_mask"], counts)
            batch |= self._dataset.tensors_of(batch)
        if media:
            inputs = {module: self._inputs(module, reads) for module, reads in media.items()}
            batch["modality_inputs"] = {
                module: None if value is None else {module: value} for module, value in inputs.items()
            }
        return batch

    def _compared(
        self,
        plan: StepPlan,
        share: Share,
        samples: Sequence[TextSample],
        loss_mask: torch.Tensor,
        counts: dict[str, np.ndarray],
    ) -> dict[str, Any]:
        """Return what a microbatch of several answers of each sample has besides. See `StepBatch.microbatches`.
        `counts`: `StepSamples.tokens`."""
        answers = torch.from_numpy(plan.of_tokens(np.arange(plan.answers * len(samples)), share))
        batch: dict[str, Any] = {
            "answers": torch.where(loss_mask > 0, answers, -1),
            "targets": torch.tensor([sample.target for sample in samples], dtype=torch.float32),
        }
        if counts:
            batch["feature_rows"] = {
                module: torch.from_numpy(plan.feature_rows(of_module, share)) for module, of_module in counts.items()
            }
        if self._dataset.reference is not None:
            rows = self._dataset.order.rows(plan.first + share.places)
            batch["reference"] = torch.from_numpy(self._dataset.reference[rows])
        return batch

    def _planned(self, plan: StepPlan, sample: TextSample, bad: BadSample | None) -> TextSample:
        """Return the sample at its planned lengths; only a stand-in may be padded. Raises DataError."""
        if plan.lengths is None:
            return sample
        planned = plan.lengths_of_answers(np.array([sample.number - plan.first])).tolist()
        first, *others = [
            self._of_length(text, length, bad) for text, length in zip(sample.answers, planned, strict=True)
        ]
        return replace(first, others=tuple(others)) if others else first

    def _of_length(self, text: TextSample, planned: int, bad: BadSample | None) -> TextSample:
        if (bad is not None or not text.length) and text.length < planned:  # planned is at least 1 in packed rows
            return replace(text, length=planned)
        if text.length != planned:
            shard, key = self._dataset.locate(text.number)
            raise DataError(
                f"{shard}, key {key!r}: its text has {text.length} tokens, and had {planned} when texts were "
                "counted: the tokenizer or the shard has changed unnoticed. Remove the *.mimo-lengths next to the "
                "shards, or in data.cache_dir, and start again"
            )
        return text

    def _read_text(self, sample: _Wanted) -> tuple[TextSample, BadSample | None]:
        return self._dataset.read_text(sample.number)

    def _read_media(self, module: str, sample: _Wanted) -> _MediaRead:
        """Return `Samples.read_media`, or only sizes or known features if these are enough."""
        number, items = sample.number, sample.items
        if module in self._sizes_only:
            return _MediaRead(self._dataset.input_sizes(number, module, items), None)
        lookup = self._dataset.lookups.get(module)
        assert lookup is None or module not in self._tiled, "features of tiles are no rows of the sequence"
        if lookup is None:
            sizes = self._dataset.input_sizes(number, module, items) if module in self._tiled else ()
            return _MediaRead(*self._dataset.read_media(number, module, items), sizes=sizes)
        identity, known = self._dataset.identity(number), []
        for item, rows in zip(items, sample.rows, strict=True):
            known.append(ItemFeatures(number, item, of_item := f"{identity}|{item}", rows, lookup(of_item)))
        unknown = [item.number for item in known if item.features is None]
        inputs, bad = self._dataset.read_media(number, module, unknown) if unknown else ([], None)
        features = tuple(replace(item, is_good=bad is None) for item in known)
        return _MediaRead(inputs, bad, features)

    def _inputs(self, module: str, reads: Sequence[_MediaRead]) -> dict[str, Any] | None:
        tensors = collate_media([item for read in reads for item in read.items], self._fields[module])
        if tensors and module in self._tiled:
            tensors["sizes"] = [size for read in reads for size in read.sizes]
        features = tuple(item for read in reads for item in read.features)
        if not features:
            return tensors
        return (tensors or {}) | {MEDIA: MicrobatchMedia(features, partial(self._read_again, module))}

    def _read_again(self, module: str, items: Sequence[ItemFeatures]) -> dict[str, Any]:
        inputs = [each for item in items for each in self._dataset.read_media(item.sample, module, [item.number])[0]]
        return collate_media(inputs, self._fields[module]) or {}


class _Wanted(NamedTuple):
    """A sample to read; for media, the numbers of its items and their rows of features."""

    number: int
    items: list[int]
    rows: list[int]


class _MediaRead(NamedTuple):
    """Media of one sample for one module; `features` if these are looked up."""

    items: Sequence[MediaInput | tuple[int, ...]]
    bad: BadSample | None
    features: Sequence[ItemFeatures] = ()
    sizes: Sequence[tuple[int, ...]] = ()
    """Sizes of tiled images."""


@dataclass(frozen=True)
class _Step:
    """A submitted step: its plan, the index data of its samples, this rank's numbers, and result callables."""

    plan: StepPlan
    samples: StepSamples
    numbers: list[dict[str, dict[int, list[int]]]]
    texts: list[Callable[[], list[Any]]]
    media: list[dict[str, Callable[[], list[Any]]]]
