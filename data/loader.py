"""The step loader: optimizer steps for one rank, read ahead in threads, in an order that no worker count changes.

`consumed_samples` is the whole state. Step after step the loader hands out samples [consumed, consumed + size of the
step), cut in microbatches of `microbatch_samples`; each reader takes its contiguous data-parallel slice of each. Bad
samples are counted when a step is handed out, not when it is read ahead: the same one ends a run at the same step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from data.bad_samples import BadSample
from data.collate import collate, collate_media
from data.dataset import Dataset
from data.features import MEDIA, MicrobatchMedia, SampleMedia
from data.outline import MediaSize
from data.step import LANGUAGE, Batching, Reader, StepBatch

_STEPS_AHEAD = 2


class StepLoader:
    """Iterator over steps. Use it as a context manager, or call `close`.

    readers: one per module that this rank reads; none is allowed (such a rank gets numbers and counts only).
    workers: threads, which read two steps ahead; 0 reads in the caller. limit: steps to hand out, None = endless.
    `next` raises what went wrong in a worker, as it was: TooManyBadSamples, ShardError, ...
    """

    def __init__(
        self,
        dataset: Dataset,
        batching: Batching,
        readers: Sequence[Reader],
        *,
        consumed_samples: int = 0,
        workers: int = 2,
        limit: int | None = None,
    ) -> None:
        assert consumed_samples >= 0 and workers >= 0, (consumed_samples, workers)
        known = {LANGUAGE, *(item.module for item in dataset.modules)}
        names = [reader.module for reader in readers]
        assert len(set(names)) == len(names) and known.issuperset(names), (names, known)
        self._dataset, self._batching, self._limit = dataset, batching, limit
        for reader in readers:  # asserts that slices are whole numbers of samples
            reader.slice(0, [0] * batching.microbatch_samples)
        self._readers = list(readers)
        self._sizes_only = {reader.module for reader in readers if reader.sizes_only}
        self._fields = {item.module: item.field for item in dataset.modules} | dict.fromkeys(self._sizes_only, "sizes")
        self._tiled = {item.module for item in dataset.modules if item.canvas} - self._sizes_only
        self._language = next((reader for reader in readers if reader.module == LANGUAGE), None)
        self._next, self._issued, self._closed = consumed_samples, 0, False
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="data") if workers else None
        self._pending: deque[_Step] = deque()

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        if self._closed:
            raise RuntimeError("this StepLoader is closed")
        try:
            self._read_ahead()
            if not self._pending:
                raise StopIteration
            step = self._pending.popleft()
            self._read_ahead()  # the place that has become free
            return self._assemble(step)
        except StopIteration:
            raise
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> StepLoader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def dataset(self) -> Dataset:
        """What it reads from."""
        return self._dataset

    def close(self) -> None:
        """Drops what was read ahead and waits for the threads to end. May be called twice."""
        self._closed = True
        self._pending.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _read_ahead(self) -> None:
        # Without threads, what is issued is read when it is assembled.
        while len(self._pending) < _STEPS_AHEAD and (self._limit is None or self._issued < self._limit):
            size = self._batching.size(self._next)
            self._pending.append(self._issue(self._next, size))
            self._next += size
            self._issued += 1

    def _issue(self, first: int, step_size: int) -> _Step:
        """Hands every sample of the step to the workers; the samples of one reader are in order."""
        size = self._batching.microbatch_samples
        starts = range(first, first + step_size, size)
        text = self._dataset.read_text
        sizes = [self._submit(self._media_sizes, start) for start in starts]
        slices = [self._slices(start, of_microbatch) for start, of_microbatch in zip(starts, sizes, strict=True)]
        return _Step(
            first,
            step_size,
            sizes,
            slices,
            texts=[[self._submit(text, number) for number in own.get(LANGUAGE, ())] for own in slices],
            media=[
                {
                    module: [self._submit(self._read_media, number, module) for number in numbers]
                    for module, numbers in own.items()
                    if module != LANGUAGE
                }
                for own in slices
            ],
        )

    def _slices(self, start: int, sizes: Callable[[], list[dict[str, MediaSize]]]) -> dict[str, range]:
        """Sample numbers that this rank reads of a microbatch, by module."""
        loads = [0] * self._batching.microbatch_samples
        return {
            reader.module: reader.slice(
                start, [size[reader.module].load for size in sizes()] if reader.balanced else loads
            )
            for reader in self._readers
        }

    def _media_sizes(self, start: int) -> list[dict[str, MediaSize]]:
        return [self._dataset.media_sizes(number) for number in range(start, start + self._batching.microbatch_samples)]

    def _submit(self, work: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        """The result, when called."""
        if self._pool is None:
            return lambda: work(*args)
        future: Future[Any] = self._pool.submit(work, *args)
        return future.result

    def _assemble(self, step: _Step) -> StepBatch:
        size, modules = self._batching.microbatch_samples, [item.module for item in self._dataset.modules]
        found: dict[int, BadSample] = {}
        microbatches = []
        for at in range(step.size // size):
            texts = [result() for result in step.texts[at]]
            media = {module: [result() for result in results] for module, results in step.media[at].items()}
            of_media = [read.bad for reads in media.values() for read in reads]
            for bad_sample in (*(bad_sample for _, bad_sample in texts), *of_media):
                if bad_sample is not None:
                    found.setdefault(bad_sample.number, bad_sample)
            microbatches.append(self._microbatch(step.slices[at], texts, media, found))
        bad = np.zeros(step.size, dtype=bool)
        for number in sorted(found):
            bad[number - step.first] = True
            self._dataset.bad_samples.record(found[number])
        sizes = [result() for result in step.sizes]
        tokens, loads, pairs = (
            {module: [[getattr(size[module], what) for size in part] for part in sizes] for module in modules}
            for what in ("tokens", "load", "pairs")
        )
        return StepBatch(step.first, microbatches, tokens, loads, pairs, bad)

    def _microbatch(
        self, slices: dict[str, range], texts: list, media: dict[str, list], bad: Container[int]
    ) -> dict[str, Any]:
        numbers = slices.get(LANGUAGE) or next(iter(slices.values()), ())
        batch: dict[str, Any] = {"sample_numbers": torch.tensor(list(numbers), dtype=torch.int64)}
        if self._language:
            # A sample whose picture failed on this very rank must not be learned from either.
            samples = [sample.without_loss() if sample.number in bad else sample for sample, _ in texts]
            batch |= collate(samples)
            if self._dataset.keep_text:
                batch["texts"] = [sample.question_and_truth for sample in samples]
        if media:
            inputs = {module: self._inputs(module, reads) for module, reads in media.items()}
            batch["modality_inputs"] = {
                module: None if value is None else {module: value} for module, value in inputs.items()
            }
        return batch

    def _read_media(self, number: int, module: str) -> _MediaRead:
        """What `Dataset.read_media` gives, unless sizes are enough or the features of the sample are known already."""
        if module in self._sizes_only:
            return _MediaRead(self._dataset.input_sizes(number, module), None)
        lookup = self._dataset.lookups.get(module)
        assert lookup is None or module not in self._tiled, "features of tiles are no rows of the sequence"
        if lookup is None:
            sizes = self._dataset.input_sizes(number, module) if module in self._tiled else ()
            return _MediaRead(*self._dataset.read_media(number, module), sizes=sizes)
        rows = self._dataset.token_counts(number)[module]
        identity = self._dataset.identity(number)
        features = lookup(identity) if rows else None
        if features is not None:
            return _MediaRead([], None, SampleMedia(number, identity, rows, features))
        items, bad = self._dataset.read_media(number, module)
        return _MediaRead(items, bad, SampleMedia(number, identity, rows, good=bad is None))

    def _inputs(self, module: str, reads: Sequence[_MediaRead]) -> dict[str, Any] | None:
        tensors = collate_media([item for read in reads for item in read.items], self._fields[module])
        if tensors and module in self._tiled:
            tensors["sizes"] = [size for read in reads for size in read.sizes]
        samples = tuple(read.sample for read in reads if read.sample is not None and read.sample.rows)
        if not samples:
            return tensors
        return (tensors or {}) | {MEDIA: MicrobatchMedia(samples, partial(self._read_again, module))}

    def _read_again(self, module: str, numbers: Sequence[int]) -> dict[str, Any]:
        items = [item for number in numbers for item in self._dataset.read_media(number, module)[0]]
        return collate_media(items, self._fields[module]) or {}


class _MediaRead(NamedTuple):
    """What was read of one sample for one module; `sample` if the module's features are looked up."""

    items: Sequence[torch.Tensor | tuple[int, int]]
    bad: BadSample | None
    sample: SampleMedia | None = None
    sizes: Sequence[tuple[int, int]] = ()
    """Of pictures that are cut into tiles."""


@dataclass(frozen=True)
class _Step:
    """A step on its way, by microbatch: what the index says of every sample, which this rank reads, and callables that
    give what was read."""

    first: int
    size: int
    sizes: list[Callable[[], list[dict[str, MediaSize]]]]
    slices: list[dict[str, range]]
    texts: list[list[Callable[[], Any]]]
    media: list[dict[str, list[Callable[[], Any]]]]
