"""Samples of a run by number, as training reads them, without a model: for notebooks and for looking at data."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.text_format import shown
from mimo_train.config.compose import load
from mimo_train.config.errors import UserError
from mimo_train.config.schema import ConfigContainer
from mimo_train.inputs.datasets import build_dataset, splits_of, tokenizer_of
from mimo_train.inputs.mixture import Mixing
from mimo_train.layout.run import Run, resolve
from mimo_train.logging.report.page import DecodedSample, token_runs

if TYPE_CHECKING:
    import torch

    from data.samples.media_spec import MediaInput
    from data.samples.protocol import Samples


@dataclass(frozen=True, eq=False)
class Sample:
    """One sample of a run; L is its number of tokens, without padding."""

    number: int
    """Number in the order of the run, or of the held-out set."""
    shard: str
    key: str
    input_ids: torch.Tensor
    """int64 [L]."""
    labels: torch.Tensor
    """int64 [L], the token after each position."""
    loss_mask: torch.Tensor
    """float32 [L], the weight of each label's loss; 0 where nothing is learned."""
    position_ids: torch.Tensor
    """int64 [L], or [3, L] for models with positions on three axes."""
    media: Mapping[str, Sequence[MediaInput]]
    """Inputs by module. Images: uint8 [3, height, width] or [tiles, 3, side, side], float32 from 0 to 255 if the
    encoder's preprocessing does not round. Audio: float32 [samples]."""
    bad: str = ""
    """Why the sample cannot be read; empty if it can. Training reads this substitute, whose loss is 0 everywhere."""
    others: tuple[Sample, ...] = ()
    """The same with its other answers, such as the rejected one of a pair."""

    def __repr__(self) -> str:
        media = "".join(f", {len(items)} for {module}" for module, items in self.media.items())
        learned = int((self.loss_mask > 0).sum())
        bad = f", bad: {self.bad}" if self.bad else ""
        return (
            f"Sample(number={self.number}, shard={self.shard!r}, key={self.key!r}, {len(self.input_ids)} tokens, "
            f"{learned} learned{media}{bad})"
        )


class RunDataset:
    """The samples of a run, or of one of its held-out sets; reads a sample when it is indexed.

    Index i is the sample number. `len` is one epoch; larger numbers of training samples continue with the next epoch.
    Reading a bad sample raises no error and is not counted. `samples` is the dataset that training reads.
    """

    def __init__(self, run: Run, tokenizer: Any, samples: Samples, length: int, is_held_out: bool) -> None:
        self.tokenizer, self.samples = tokenizer, samples
        self._run, self._length, self._is_held_out = run, length, is_held_out

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sample]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Sample:
        """Read a sample. Raises IndexError if no sample has this number, TypeError if it is not an integer, DataError
        if a shard cannot be read or a package is missing."""
        from data.collate import collate

        number = operator.index(number)  # numpy's integers overflow in the arithmetic of orders
        if number < 0 or (self._is_held_out and number >= len(self)):
            raise IndexError(
                f"sample {number} is out of range: numbers start at 0, and there are {len(self):,} samples"
            )
        text, bad = self.samples.read_text(number)
        media = {}
        for item in self.samples.modules:
            media[item.module], bad_media = self.samples.read_media(number, item.module)
            bad = bad or bad_media
        if bad is not None:
            text = text.without_loss()
        shard, key = self.samples.locate(number)
        samples = []
        for answer in text.answers:
            row = collate([answer], answer.length)
            sample = Sample(
                number,
                str(shard),
                str(key),
                input_ids=row["input_ids"][0],
                labels=row["labels"][0],
                loss_mask=row["loss_mask"][0],
                position_ids=row["position_ids"].squeeze(-2),
                media=media,
                bad="" if bad is None else bad.reason,
            )
            samples.append(sample)
        return replace(samples[0], others=tuple(samples[1:]))

    def decode(self, sample: Sample) -> DecodedSample:
        """Return the text, images, audio and small videos of a sample. Notebooks show learned tokens in colour."""
        from mimo_train.evaluation.predictions import shown_media

        ids, learned = sample.input_ids.tolist(), [False, *(sample.loss_mask > 0).tolist()]
        if learned[-1]:  # the label of the last position, which a cut sequence does not read
            ids.append(int(sample.labels[-1]))
        media = shown_media(self.samples, sample.number, sample.media, seconds=None)
        placeholders = {self.tokenizer.placeholder_id(item.placeholder) for item in self.samples.modules}
        return DecodedSample(
            sample.number,
            f"{Path(sample.shard).name}: {shown(sample.key)}",
            media["images"],
            media["clips"],
            token_runs(ids, learned[: len(ids)], placeholders, self.tokenizer.shown),
            len(sample.input_ids),
            sum(learned),
            shown(sample.bad),
            media["videos"],
        )

    def step_samples(self, step: int) -> range:
        """Return the sample numbers of optimizer step `step` (counted from 1) of a run that starts with this config.
        Raises UserError for a held-out set, IndexError if `step` is below 1."""
        if self._is_held_out:
            raise UserError("step_samples: training steps read no held-out samples. Use open_dataset(config)")
        if step < 1:
            raise IndexError(f"step {step} is out of range: steps start at 1")
        return range(self._run.batch.samples_of(step - 1), self._run.batch.samples_of(step))

    def close(self) -> None:
        """Close the files."""
        self.samples.close()


def open_dataset(
    config: str | Path | ConfigContainer, overrides: Sequence[str] = (), *, split: str = "train"
) -> RunDataset:
    """Open the samples of a run in its order, without a model and without process groups.

    Indexes the shards and makes a missing demo, as training does.

    Args:
        config: a shipped name such as `vlm_digits`, a YAML file, or a config.
        overrides: `key=value`, with a name or a file.
        split: `train`; `validation` for the first held-out set; `validation/NAME` for one with a name; `test`,
            `test/NAME`.

    Raises:
        ConfigError: the config has errors.
        UserError: there is no such split, or its samples have no numbers.
        DataError: shards or tokenizer cannot be read.
    """
    if isinstance(config, ConfigContainer):
        if overrides:
            raise UserError("overrides: a config object takes none. Set its attributes, or give its name or file")
        cfg = config
    else:
        cfg = load(str(config), overrides, weights=False)
    run = resolve(cfg)
    held_out = None
    if split != "train":
        names = splits_of(cfg)
        if split not in names:
            raise UserError(f"split: {split!r} does not exist. Choose one of {', '.join(['train', *names])}")
        held_out = names[split]
    if cfg.data.demo:
        from data.demo.make import make_demo

        make_demo(Path(cfg.data.shards).parent, cfg.data.demo)
    tokenizer = tokenizer_of(cfg)
    samples = build_dataset(cfg, tokenizer, held_out=held_out)
    length = len(samples)
    if held_out is None:
        samples.set_phases(Mixing(cfg, run.batch, samples.order.sizes).phases)
    else:
        length = min(held_out.samples or length, length)
    return RunDataset(run, tokenizer, samples, length, held_out is not None)
