"""The data-parallel rank of an encoder that computes each media item of a step, and the rank that needs its features.

It is arithmetic on the index, so all ranks compute the same routes without communication. A media item is an image, an
audio item, a video, or a part of a video that is encoded independently of the others: a frame that is read as an image,
or frames of one time. Items are identified by their sample and their number in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from data.order.packing import largest_first
from data.order.step_plan import StepPlan


@dataclass(frozen=True)
class MediaItems:
    """Media items of one module, those of a sample one after the other. Arrays are int64 [items]."""

    places: np.ndarray
    """Place of the item's sample in the step."""
    numbers: np.ndarray
    """Number of the item among those of its sample and kind, from 0; each part of a video counts."""
    tokens: np.ndarray
    """Tokens in the sequence: rows of features."""
    loads: np.ndarray
    """Tokens inside the encoder's layers."""
    work: np.ndarray
    """Cost of encoding the item, in units of one token outside of attention."""
    parts: np.ndarray
    """Parts of its video; 1 for other items."""

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, which: np.ndarray | slice) -> MediaItems:
        """Return some of the items, in the order of an array of indices, a mask, or a slice."""
        return MediaItems(*(getattr(self, field.name)[which] for field in fields(self)))


def item_per_sample(rows: np.ndarray) -> MediaItems:
    """Return one item for each sample with features. `rows`: int64 [samples], its rows of features."""
    places = np.flatnonzero(rows)
    tokens = rows[places]
    return MediaItems(places, np.zeros_like(places), tokens, tokens, tokens, np.ones_like(places))


@dataclass(frozen=True)
class Routes:
    """The media items of a microbatch, in the order of its samples."""

    items: MediaItems
    sources: np.ndarray
    """int64 [items], the encoder's data-parallel rank that computes the item."""
    destinations: np.ndarray
    """int64 [items], ascending: the data-parallel rank that needs its features."""

    def sent(self, source: int, destinations: int) -> np.ndarray:
        """Return the rows of features that a source sends to each of the destinations. It computes its items in the
        order of samples, so these parts follow each other."""
        return _sums(self.destinations, np.where(self.sources == source, self.items.tokens, 0), destinations)

    def received(self, destination: int, sources: int) -> np.ndarray:
        """Return the rows of features that a destination receives from each of the sources."""
        return _sums(self.sources, np.where(self.destinations == destination, self.items.tokens, 0), sources)

    def order(self, destination: int) -> np.ndarray | None:
        """Return for each row of a destination, in the order of samples, its place among the received rows, source by
        source. None if both are the same."""
        received = self.destinations == destination
        sources, rows = self.sources[received], self.items.tokens[received]
        if (sources[1:] >= sources[:-1]).all():
            return None
        came = np.argsort(sources, kind="stable")
        firsts = np.empty_like(rows)
        firsts[came] = np.cumsum(rows[came]) - rows[came]
        return np.repeat(firsts - np.cumsum(rows) + rows, rows) + np.arange(rows.sum())

    def work(self, ranks: int) -> np.ndarray:
        """Return the work of each data-parallel rank of the encoder."""
        return _sums(self.sources, self.items.work, ranks)


def routes_of(
    items: MediaItems, plan: StepPlan, ranks: int, by_items: bool, pass_microbatches: int = 1
) -> list[Routes]:
    """Return the routes of each microbatch of a step from an encoder of `ranks` data-parallel ranks.

    Ranks get equal numbers of neighbouring samples, if `by_items` is False and rows are not packed. Otherwise the item
    with the most work goes first, each to the rank with the least work of the pass (Graham 1969, longest processing
    time first). Parts of videos then fill all ranks to one level, neighbours together (McNaughton 1959, wrap-around
    rule). The most loaded share of a pass goes to the rank with the least work in the passes before.

    Args:
        items: the module's items of the step.
        pass_microbatches: microbatches that the encoder computes in one pass.
    """
    positions, replicas = plan.positions_and_replicas
    of_samples = positions[items.places]
    order = np.argsort(of_samples, kind="stable")
    items, of_samples = items[order], of_samples[order]
    bounds = np.searchsorted(of_samples, np.cumsum([0, *map(len, plan.places)]))
    if by_items or plan.packed:
        sources = np.zeros(len(items), dtype=np.int64)
        starts = [*range(0, len(plan.places), pass_microbatches), len(plan.places)]
        passes = [items[bounds[first] : bounds[last]] for first, last in zip(starts, starts[1:], strict=False)]
        if ranks > 1:
            sources = np.concatenate([sources[:0], *_deal(passes, ranks)])
    else:
        share = len(plan.places[0]) // ranks
        sources = of_samples % (share * ranks) // share
    destinations = replicas[items.places]
    cuts = [slice(first, last) for first, last in zip(bounds, bounds[1:], strict=False)]
    return [Routes(items[cut], sources[cut], destinations[cut]) for cut in cuts]


def _deal(passes: list[MediaItems], ranks: int) -> Iterator[np.ndarray]:
    """Yield the rank of each item of every pass, int64."""
    so_far = np.zeros(ranks, dtype=np.int64)
    for items in passes:
        work, whole, divided = items.work, np.flatnonzero(items.parts == 1), np.flatnonzero(items.parts > 1)
        shares = np.zeros(len(work), dtype=np.int64)
        for share, members in enumerate(largest_first(work[whole], ranks)):
            shares[whole[members]] = share
        shares[divided] = _fill_evenly(_sums(shares[whole], work[whole], ranks), work[divided])
        loads = _sums(shares, work, ranks)
        rank_of = np.empty(ranks, dtype=np.int64)
        rank_of[np.argsort(-loads, kind="stable")] = np.argsort(so_far, kind="stable")
        so_far[rank_of] += loads
        yield rank_of[shares]


def _fill_evenly(loads: np.ndarray, work: np.ndarray) -> np.ndarray:
    """Return the share of each part, int64: parts of `work` in their order fill shares with `loads` up to one level,
    which none exceeds by more than a part."""
    levels = -(-(np.cumsum(np.sort(loads)) + work.sum()) // np.arange(1, len(loads) + 1))
    ends = np.cumsum(np.maximum(levels.min() - loads, 0))
    return np.searchsorted(2 * ends, 2 * np.cumsum(work) - work)


def _sums(groups: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """Return sums of integer values by group, int64 [size]."""
    sums = np.zeros(size, dtype=np.int64)
    np.add.at(sums, groups, values)
    return sums
