"""The work of each microbatch from the lengths of texts and the sizes of media in the run's data.

Steps are split as in training, for each layout: microbatches of similar lengths, packs, parts of encoders. Loads are
shares of a microbatch of the largest samples, for which costs are computed. Torch is only imported to read shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from data.errors import DataError
from data.indexed.find import find_any
from data.order.step_plan import balanced_parts, spread_parts
from mimo_train.config.errors import UserError
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import LayoutConfig
from mimo_train.estimate.flops import AT_THE_END, Flops, StepFlops, module_work
from mimo_train.inputs.datasets import build_dataset, tokenizer_of, training_sources
from mimo_train.inputs.padding import padding_of
from mimo_train.layout.batch import pack_length
from mimo_train.preflight.plan.candidate import Candidate

if TYPE_CHECKING:
    from data.order.step import StepSamples
    from data.pipeline import Samples, StepPlan

STEPS = 4
"""Steps of the run to read, spread over its data."""
COUNTED = 20_000
"""Maximum number of texts to tokenize for a plan; with more uncounted texts, rows count as full."""


class Load(NamedTuple):
    """The work of a stage in the microbatches of a step, as shares of a full microbatch."""

    shares: tuple[float, ...]
    """Share of each microbatch; for several steps only of the first and the last."""
    total: float
    microbatches: float

    @classmethod
    def of(cls, shares: Sequence[float]) -> Load:
        return cls(tuple(shares), sum(shares), len(shares))

    @classmethod
    def mean(cls, loads: Sequence[Load]) -> Load:
        """Return the mean load of several steps."""
        ends = fmean(load.shares[0] for load in loads), fmean(load.shares[-1] for load in loads)
        return cls(ends, fmean(load.total for load in loads), fmean(load.microbatches for load in loads))


Loads = Mapping[str, Load]
"""Load by module, of its busiest data-parallel rank."""


@dataclass(frozen=True)
class KnownStep:
    first: int
    """Index of the first sample."""
    samples: StepSamples


class Counts:
    """Computes the loads of layouts; `vocab`: rows of the embedding; `media`: media items per encoder in a full
    sample."""

    def __init__(self, cfg: ConfigContainer, vocab: int, media: Mapping[str, float], steps: Sequence[KnownStep]):
        self._cfg, self._steps, self._vocab = cfg, steps, vocab
        self._flops = StepFlops(cfg, vocab)
        self._of_text: Callable[[int], float] = cache(lambda length: self._text({length: 1}))
        self._full = {name: module_work(cfg, name, vocab, media[name]).whole.total for name in cfg.encoders}
        self._of_sample = [self._encoders(step.samples) for step in steps]
        self._plans = cache(self._plans_of)
        self._of_module = cache(self._loads_of)

    def loads(self, candidate: Candidate) -> list[Loads]:
        """Return the loads in each step."""
        by_module = {name: each for name, (each, _) in self._by_module(candidate).items()}
        return [{name: each[step] for name, each in by_module.items()} for step in range(len(self._steps))]

    def mean(self, candidate: Candidate) -> Loads:
        """Return the mean loads of all steps."""
        return {name: mean for name, (_, mean) in self._by_module(candidate).items()}

    def _by_module(self, candidate: Candidate) -> dict[str, tuple[list[Load], Load]]:
        layout, micro = candidate.language, candidate.micro_batch_size
        key = micro, layout.dp, layout.cp, layout.tp if layout.sp else 1, layout.pp if layout.vpp > 1 else 0
        return {name: self._of_module(key, name, own.dp) for name, own in candidate.layouts.items()}

    def _loads_of(self, key: tuple[int, ...], name: str, dp: int) -> tuple[list[Load], Load]:
        loads = self._language(key) if name == LANGUAGE else self._encoder(key, name, dp)
        return loads, Load.mean(loads)

    def _plans_of(self, key: tuple[int, ...]) -> list[StepPlan]:
        from data.pipeline import Batching

        micro, dp, cp, sp, groups = key
        layout = LayoutConfig(dp=dp, cp=cp, tp=sp, sp=sp > 1, pp=max(1, groups), vpp=2 if groups else 1)
        language = replace(self._cfg.language, layout=layout)
        cfg = replace(
            self._cfg,
            modules={**self._cfg.modules, LANGUAGE: language},
            train=replace(self._cfg.train, micro_batch_size=micro),
        )
        batching = Batching(cfg.train.global_batch_size, micro * dp, None, dp, padding_of(cfg))
        return [
            batching.plan(
                step.first,
                cfg.train.global_batch_size,
                step.samples.lengths,
                cfg.data.sequence_length,
                step.samples.documents if cfg.data.pack else None,
            )
            for step in self._steps
        ]

    def _rows(self, key: tuple[int, ...]) -> int:
        """Return the samples of a data-parallel rank in a full microbatch, as in `Predictor.rows`."""
        return pack_length(self._cfg) // self._cfg.data.sequence_length if self._cfg.data.pack_length else key[0]

    def _language(self, key: tuple[int, ...]) -> list[Load]:
        full = self._rows(key) * self._of_text(self._cfg.data.sequence_length)
        loads = []
        for plan in self._plans(key):
            work = np.array(
                [
                    [self._of_share(plan, microbatch, replica) for replica in range(len(of_ranks))]
                    for microbatch, of_ranks in enumerate(plan.shares)
                ]
            )
            loads.append(_of_busiest(work / full))
        return loads

    def _of_share(self, plan: StepPlan, microbatch: int, replica: int) -> float:
        if not plan.packed:
            share = plan.shares[microbatch][replica]
            return len(share.places) * self._of_text(share.length)
        texts = plan.texts_of(microbatch, replica)
        return sum(number * self._of_text(length) for length, number in texts.items())

    def _encoder(self, key: tuple[int, ...], name: str, dp: int) -> list[Load]:
        full = self._full[name] * self._rows(key) * key[1] / dp
        return [
            _of_busiest(self._of_ranks(plan, step.samples.loads[name], of_sample[name], name, dp) / full)
            for plan, step, of_sample in zip(self._plans(key), self._steps, self._of_sample, strict=True)
        ]

    def _of_ranks(self, plan: StepPlan, loads: np.ndarray, work: np.ndarray, name: str, dp: int) -> np.ndarray:
        """Return FLOPs of the ranks of an encoder, [microbatches, dp], with samples split as in `StepShapes.spans`."""
        places = [plan.places(microbatch) for microbatch in range(len(plan.shares))]
        loads_of = [loads[samples].tolist() for samples in places]
        if plan.packed:
            parts = spread_parts(loads_of, dp)
        elif self._cfg.modules[name].balance == "patches":
            parts = [balanced_parts(each, dp) for each in loads_of]
        else:
            return work[np.concatenate(places)].reshape(len(places), dp, -1).sum(axis=2)
        return np.array(
            [[work[of[first:last]].sum() for first, last in spans] for of, spans in zip(places, parts, strict=True)]
        )

    def _text(self, texts: Mapping[int, int]) -> float:
        return self._flops.of_texts(texts, AT_THE_END).hardware

    def _encoders(self, samples: StepSamples) -> dict[str, np.ndarray]:
        flops = {}
        for name in self._cfg.encoders:
            numbers = samples.tokens[name], samples.loads[name], samples.pairs[name]
            flops[name] = sum(
                (numbers[at] * self._one(name, at).hardware for at in range(3)), np.zeros(len(numbers[0]))
            )
        return flops

    def _one(self, name: str, at: int) -> Flops:
        """Return the FLOPs of an encoder per unit of one of its numbers: rows, tokens, pairs."""
        counts, loads, pairs = (
            {other: [[int(own == at and other == name)]] for other in self._cfg.encoders} for own in range(3)
        )
        return self._flops(texts={}, counts=counts, loads=loads, pairs=pairs, step=AT_THE_END)[name]


def _of_busiest(work: np.ndarray) -> Load:
    """Return the load of the busiest rank; `work`: [microbatches, ranks]."""
    return Load.of(work[:, int(work.sum(axis=0).argmax())].tolist())


def known_steps(cfg: ConfigContainer, dataset: Samples) -> list[KnownStep]:
    """Return steps of full size, spread over the data.

    Raises:
        DataError: padding or packing depends on text lengths, and too many of them are unknown.
    """
    from data.pipeline import ShardDataset
    from data.samples.text_lengths import TextLengths

    if padding_of(cfg) is not None and isinstance(dataset, ShardDataset):
        lengths = TextLengths(dataset)
        missing = sum(map(dataset.samples_of, lengths.missing()))
        if missing > COUNTED:
            raise DataError(f"{missing:,} texts are not counted yet: `mimo-train shards index CONFIG` counts them")
        for _ in lengths.build(processes=1):
            pass
        lengths.serve()
    size = cfg.train.global_batch_size
    firsts = sorted({len(dataset) * at // STEPS // size * size for at in range(STEPS)})
    return [KnownStep(first, dataset.plan_step(first, size)) for first in firsts]


def steps_at_hand(cfg: ConfigContainer) -> tuple[tuple[KnownStep, ...], str]:
    """Return (`known_steps` of the run's data, the reason if there are none)."""
    data = cfg.data
    if not data.shards and not data.mix:
        return (), "data.shards is empty"
    try:
        for source in training_sources(cfg):
            find_any(source.shards)  # fails before the data path imports torch
        with closing(build_dataset(cfg, tokenizer_of(cfg))) as dataset:
            return tuple(known_steps(cfg, dataset)), ""
    except (DataError, OSError, UserError) as error:
        return (), str(error)
