"""Any run: whatever its mixture, ranks, workers, rows and storage are, and wherever it is cut, it trains the samples of
the run that was never interrupted, in their order.

A few runs, always the same; MIMO_RANDOM_DATA=2000 draws that many others. What is compared is what the batches hold:
the key in each text and the colour of each image, not the numbers of samples that say which they should be.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import MemoryStore

from data.loader import StepLoader
from data.order.mixture import whole_weights
from data.order.packing import Packing
from data.order.sources import Source
from data.order.step import Batching, Reader
from data.order.step_plan import Padding
from data.samples.shard_dataset import ShardDataset
from data.samples.text_lengths import TextLengths
from data.storage import object_store
from data.storage.object_store import ObjectStore
from data.storage.url import Url
from data.text.tokens import build_tokenizer
from mimo_train.layout.batch import Batch
from tests.tars import write_tar
from tests.unit.data.helpers import chat, encode_image, images

EXAMPLES = int(os.environ.get("MIMO_RANDOM_DATA", "0"))
SIZES = {"a": 11, "b": 5, "c": 8}
"""Samples by source; `a` is two shards."""
LONGEST = 60
COLOURS = 9  # between the colours of two samples


@dataclass(frozen=True)
class Start:
    """One start of a run: its layout, its rows, and how many steps until it is cut."""

    dp: int
    vision: int
    balanced: bool
    workers: int
    micro: int
    rows: Padding | Packing | None
    remote: bool
    steps: int
    weights: tuple[int, ...] | None
    """From here on."""


@dataclass(frozen=True)
class Run:
    """Sources by name, their weights, a growing batch, and starts."""

    sources: tuple[str, ...]
    weights: tuple[int, ...] | None
    held: float
    seed: int
    shuffle: bool
    block: int
    batch: tuple[int, int, int, int]
    """Full size, first size, increment, samples of the growth."""
    starts: tuple[Start, ...]


@st.composite
def starts(draw, sources: int) -> Start:
    rows = st.one_of(
        st.none(),
        st.builds(Padding, st.sampled_from([1, 8, 12]), st.booleans()),
        st.builds(Packing, st.integers(LONGEST, 200), st.sampled_from([1, 4]), st.integers(1, 3), st.booleans()),
    )
    dp, micro = draw(st.sampled_from([(1, 1), (1, 4), (2, 1), (2, 2), (4, 1)]))
    return Start(
        dp=dp,
        vision=draw(st.sampled_from([size for size in (1, 2, 4) if dp * micro % size == 0])),
        balanced=draw(st.booleans()),
        workers=draw(st.sampled_from([0, 0, 1, 3])),
        micro=micro,
        rows=draw(rows),
        remote=draw(st.integers(0, 3)) == 0,
        steps=draw(st.integers(1, 4)),
        weights=draw(st.one_of(st.none(), weights_of(sources))),
    )


def weights_of(sources: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, 9), min_size=sources, max_size=sources).filter(any).map(tuple)


@st.composite
def runs(draw) -> Run:
    sources = tuple(draw(st.permutations(sorted(SIZES)))[: draw(st.integers(1, 3))])
    first = draw(st.sampled_from([4, 8, 16]))
    return Run(
        sources=sources,
        weights=draw(st.one_of(st.none(), weights_of(len(sources)))),
        held=draw(st.sampled_from([0, 0, 0.2])),
        seed=draw(st.integers(0, 2**40)),
        shuffle=draw(st.booleans()),
        block=draw(st.sampled_from([1, 1, 3, 20])),
        batch=(16, first, 4, draw(st.integers(0, 60))),
        starts=tuple(draw(st.lists(starts(len(sources)), min_size=1, max_size=3))),
    )


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Iterator[tuple[Path, Path]]:
    """(folder with `a-0.tar` and so on, which are in a bucket `s3://shards` in memory too; folder for indexes)."""
    folder, bucket = tmp_path_factory.mktemp("shards"), ObjectStore.__new__(ObjectStore)
    bucket._scheme, bucket._versions, bucket._store = "s3", {}, MemoryStore()
    object_store._STORES["s3", "shards"] = bucket
    number = 0
    for source, size in SIZES.items():
        members = []
        for n in range(size):
            colour, key = number * COLOURS, f"{source}{n:02d}"
            drawn_images = [encode_image(8 + n, 12, "PNG", value=colour)] * (number % 3)
            members += [(f"{key}.{at}.png", image) for at, image in enumerate(drawn_images)]
            members.append(
                (f"{key}.json", chat("<image>" * len(drawn_images) + "?", f"[{key}]" + "." * (number * 7 % 23)))
            )
            number += 1
        cut = len(members) // 2 if source == "a" else len(members)
        cut -= next(back for back in range(len(members)) if members[cut - back - 1][0].endswith("json"))
        for at, part in enumerate((members[:cut], members[cut:])):
            if part:
                path = write_tar(folder / f"{source}-{at}.tar", part)
                bucket.put(Url.parse(f"s3://shards/{path.name}"), path.read_bytes())
    yield folder, tmp_path_factory.mktemp("indexes")
    del object_store._STORES["s3", "shards"]


def colour_of(key: str) -> int:
    """What the images of a sample are filled with."""
    before = {"a": 0, "b": SIZES["a"], "c": SIZES["a"] + SIZES["b"]}
    return (before[key[0]] + int(key[1:])) * COLOURS


def opened(shards: tuple[Path, Path], run: Run, phases: list, remote: bool = False) -> ShardDataset:
    """The samples of a run, with lengths of their texts, as they are after a start."""
    folder, indexes = shards
    place = "s3://shards" if remote else str(folder)
    weights = run.weights or (None,) * len(run.sources)
    sources = [
        Source(name, f"{place}/{name}-*.tar", weight=weight) for name, weight in zip(run.sources, weights, strict=True)
    ]
    media = (images(side=4, tokens=2),)
    data = ShardDataset(
        sources,
        tokenizer=build_tokenizer("bytes", [item.placeholder for item in media]),
        sequence_length=LONGEST,
        media=media,
        seed=run.seed,
        shuffle=run.shuffle,
        shuffle_block=run.block,
        cache_dir=indexes,
        held_fraction=run.held,
    )
    list(TextLengths(data).build(processes=1))
    TextLengths(data).serve()
    if phases:
        data.set_phases(phases)
    return data


def trained(data: ShardDataset, run: Run, start: Start, consumed: int) -> list[list[str]]:
    """The keys of the samples of each step, in the order of their numbers, from what all ranks of both modules get."""
    batch = Batch(run.batch[0], start.micro, start.dp, *run.batch[1:])
    batching = Batching(batch.global_batch_size, batch.microbatch_samples, batch.size_at, batch.replicas, start.rows)
    readers = [Reader("language", rank, start.dp) for rank in range(start.dp)]
    readers += [Reader("images", rank, start.vision, start.balanced) for rank in range(start.vision)]
    ranks = []
    for reader in readers:
        # Endless, and closed after some steps: what it has read ahead by then is lost.
        with StepLoader(data, batching, [reader], consumed_samples=consumed, workers=start.workers) as loader:
            ranks.append([next(loader) for _ in range(start.steps)])
    steps = []
    for of_ranks in zip(*ranks, strict=True):
        texts, drawn_images = dict[int, str](), Counter[int]()
        for reader, step in zip(readers, of_ranks, strict=True):
            assert (step.first_sample, step.size) == (consumed, batch.size_at(consumed))
            for microbatch in step.microbatches:
                if reader.module == "images":
                    inner = microbatch["modality_inputs"]["images"]
                    for image in inner["images"]["pixels"] if inner else ():
                        (colour,) = set(image.flatten().tolist())
                        drawn_images[colour] += 1
                    continue
                keys = [key for row in microbatch["input_ids"].tolist() for key in keys_in(row)]
                numbers = microbatch["sample_numbers"].tolist()
                assert not texts.keys() & numbers, "trained twice"
                texts |= zip(numbers, keys, strict=True)
        keys = [key for _, key in sorted(texts.items())]
        assert sorted(texts) == list(range(consumed, consumed + batch.size_at(consumed)))
        assert drawn_images == Counter(colour_of(key) for key in keys for _ in range(images_of(key)))
        consumed += batch.size_at(consumed)
        steps.append(keys)
    return steps


def images_of(key: str) -> int:
    return colour_of(key) // COLOURS % 3


def keys_in(row: list[int]) -> list[str]:
    """Of the texts that stand in a row of tokens."""
    text = bytes(token if token < 128 else 0 for token in row).decode()
    return re.findall(r"\[(\w\d\d)\]", text)


@settings(max_examples=EXAMPLES or 25, derandomize=not EXAMPLES, deadline=None)
@given(run=runs())
def test_it_trains_the_samples_of_the_run_that_was_never_interrupted(shards, run):
    phases = [(0, whole_weights(run.weights))] if run.weights else []
    done, cut = 0, list[list[str]]()
    for start in run.starts:
        if phases and start.weights:
            phases = [phase for phase in phases if phase[0] < done] + [(done, whole_weights(start.weights))]
        steps = trained(opened(shards, run, phases, start.remote), run, start, done)
        cut += steps
        done += sum(map(len, steps))
    data = opened(shards, run, phases)
    plain = Start(1, 1, False, 0, 1, None, False, len(cut), None)
    assert cut == trained(data, run, plain, 0)
    keys = [key for step in cut for key in step]
    sizes = data.order.sizes
    for at, (name, size) in enumerate(zip(run.sources, sizes, strict=True)):
        mine = [key for key in keys if key[0] == name]
        epochs = [mine[first : first + size] for first in range(0, len(mine), size)]
        assert all(len(set(epoch)) == len(epoch) for epoch in epochs), "a sample twice in an epoch"
        assert len({key for epoch in epochs[:-1] for key in epoch}) in (0, size), "an epoch without some samples"
        assert len(mine) == data.order.counts(done)[at]
        if not run.held:
            assert size == SIZES[name]
    phases = phases or [(0, whole_weights(sizes))]
    boundary, counted = 0, np.zeros(len(sizes))
    for step in cut:
        boundary += len(step)
        counted += [sum(key[0] == name for key in step) for name in run.sources]
        assert (abs(counted - shares(phases, boundary)) < len([one for one in phases if one[0] < boundary])).all()


def shares(phases: list, places: int) -> np.ndarray:
    """Samples of each source among so many, as its weights have it exactly."""
    found = np.zeros(len(phases[0][1]))
    ends = [begin for begin, _ in phases[1:]] + [places]
    for (begin, weights), end in zip(phases, ends, strict=True):
        found += max(min(end, places) - begin, 0) * np.array(weights) / sum(weights)
    return found
