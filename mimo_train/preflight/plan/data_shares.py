"""The work of the run's data relative to full samples. Torch is only imported to read shards."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING

from data.errors import DataError
from data.indexed.find import find_any
from mimo_train.config.errors import UserError
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import LayoutConfig
from mimo_train.estimate.flops import AT_THE_END, StepFlops, module_work
from mimo_train.inputs.datasets import build_dataset, tokenizer_of, training_sources
from mimo_train.inputs.padding import padding_of
from mimo_train.preflight.plan.predict import DataShares

if TYPE_CHECKING:
    from data.order.step import StepSamples
    from data.samples.protocol import Samples

STEPS = 4
"""Steps of the run to read, spread over its data."""
COUNTED = 20_000
"""Maximum number of texts to tokenize for a plan; with more uncounted texts, rows count as full."""


def data_shares(cfg: ConfigContainer, vocab: int, media: Mapping[str, float]) -> DataShares:
    """Return the mean shares of some steps of the data; all full, with the reason, if it cannot be read.

    Args:
        vocab: rows of the embedding.
        media: media items of each encoder in a full sample.
    """
    data = cfg.data
    if not data.shards and not data.mix:
        return DataShares(missing="data.shards is empty")
    try:
        for source in training_sources(cfg):
            find_any(source.shards)  # fails before the data path imports torch
        with closing(build_dataset(cfg, tokenizer_of(cfg))) as dataset:
            steps = _steps(cfg, dataset)
    except (DataError, OSError, UserError) as error:
        return DataShares(missing=str(error))
    return shares_of(cfg, vocab, media, steps)


def _steps(cfg: ConfigContainer, dataset: "Samples") -> list["StepSamples"]:
    """Return steps of full size, spread over the data.

    Raises:
        DataError: padding or packing depends on text lengths, and too many of them are unknown.
    """
    from data.samples.shard_dataset import ShardDataset
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
    return [dataset.plan_step(first, size) for first in firsts]


def shares_of(
    cfg: ConfigContainer, vocab: int, media: Mapping[str, float], steps: Sequence["StepSamples"]
) -> DataShares:
    """Return the mean shares of steps, cut into microbatches as on one rank. Arguments as in `data_shares`."""
    from data.order.step import Batching

    language = replace(cfg.language, layout=LayoutConfig())
    cfg = replace(cfg, modules={**cfg.modules, LANGUAGE: language})
    size, length, answers = cfg.train.global_batch_size, cfg.data.sequence_length, cfg.traits.answers
    batching = Batching(size, gcd(size, cfg.train.micro_batch_size), None, 1, padding_of(cfg))
    step_flops, tokens = StepFlops(cfg, vocab), 0.0
    done, full = dict.fromkeys(cfg.modules, 0.0), dict[str, float]()
    for name in cfg.modules:
        if name == LANGUAGE:
            full[name] = size * answers * step_flops.of_texts({length: 1}, AT_THE_END).hardware
        else:
            full[name] = size * module_work(cfg, name, vocab, media[name]).whole.total
    for samples in steps:
        documents = samples.documents if cfg.data.pack or answers > 1 else None
        plan = batching.plan(0, size, samples.lengths, length, documents, answers)
        numbers = {
            key: {name: [each.tolist()] for name, each in getattr(samples, field).items()}
            for key, field in (("counts", "tokens"), ("loads", "loads"), ("pairs", "pairs"))
        }
        for name, flops in step_flops(texts=plan.texts_of_length, **numbers, step=AT_THE_END).items():
            done[name] += flops.hardware / len(steps)
        lengths = samples.lengths
        tokens += (1.0 if lengths is None else float(lengths.sum()) / (size * cfg.sample_length)) / len(steps)
    return DataShares(tokens, {name: done[name] / full[name] for name in cfg.modules}, len(steps))
