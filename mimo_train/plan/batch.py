"""Samples of a step: what divides them, and how they grow (`train.rampup_batch_size`). Imports no torch.

The rule of growth is Megatron's: [first, increment, samples] takes (global_batch_size - first) / increment steps up,
at equal distances in consumed samples, and is at the full size once more than `samples` are consumed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mimo_train.config.schema import LANGUAGE, ConfigContainer, Fault, LayoutConfig

KEY = "train.rampup_batch_size"


@dataclass(frozen=True)
class BatchSizes:
    """Size of the global batch, as a function of the samples consumed before it."""

    full: int
    """Size at the end."""
    first: int = 0
    """Size at the start; 0 means that there is no ramp-up."""
    increment: int = 0
    samples: int = 0
    """Consumed samples at which the ramp ends."""

    @classmethod
    def of(cls, cfg: ConfigContainer) -> "BatchSizes":
        """The sizes of a run whose values have no `faults`."""
        return cls(cfg.train.global_batch_size, *cfg.train.rampup_batch_size)

    def at(self, consumed: int) -> int:
        """Samples of the step that begins after `consumed` samples."""
        if not self.first or consumed > self.samples:
            return self.full
        steps_up = (self.full - self.first) // self.increment
        if not steps_up or not self.samples:
            return self.full
        return min(self.full, self.first + int(consumed / (self.samples / steps_up)) * self.increment)

    def all(self) -> Iterator[int]:
        """Every size, in order."""
        if self.first:
            yield from range(self.first, self.full, self.increment)
        yield self.full

    def samples_of(self, steps: int) -> int:
        """Samples of the first `steps` steps."""
        consumed = 0
        for done in range(steps):
            if not self.first or consumed > self.samples:
                return consumed + (steps - done) * self.full
            consumed += self.at(consumed)
        return consumed


def rampup_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    """What is wrong with `train.rampup_batch_size`, in a run whose batch is right at its full size."""
    values, train, language = cfg.train.rampup_batch_size, cfg.train, cfg.language.layout
    if not values:
        return
    if len(values) != 3:
        yield Fault(KEY, f"takes [first size, increment, samples], has {len(values)} numbers: {values}")
        return
    first, increment, samples = values
    full = train.global_batch_size
    if first < 1 or increment < 1 or samples < 0:
        yield Fault(KEY, f"first size and increment are at least 1 and samples at least 0, are {values}")
        return
    if first > full or (full - first) % increment:
        yield Fault(
            KEY,
            f"steps of {increment} do not lead from {first} to train.global_batch_size {full}: use a first size below "
            f"it and an increment that divides {full - first}",
        )
        return
    microbatch = train.micro_batch_size * language.dp
    unit = microbatch * (language.pp if language.vpp > 1 else 1)
    wrong = [size for size in BatchSizes.of(cfg).all() if size % unit]
    if wrong:
        interleaved = f" x modules.{LANGUAGE}.layout.pp {language.pp}" if language.vpp > 1 else ""
        yield Fault(
            KEY,
            f"a step of {wrong[0]} samples is not a multiple of {unit} (train.micro_batch_size "
            f"{train.micro_batch_size} x modules.{LANGUAGE}.layout.dp {language.dp}{interleaved}): use multiples of "
            f"{unit}",
        )


def batch_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    """What is wrong with batch sizes and sequence length over the modules' parallel sizes."""
    train, language = cfg.train, cfg.language.layout
    for field in ("iters", "global_batch_size", "micro_batch_size"):
        if getattr(train, field) < 1:
            yield Fault(f"train.{field}", f"must be at least 1, is {getattr(train, field)}")
            return
    microbatch = train.micro_batch_size * language.dp
    if train.global_batch_size % microbatch:
        yield Fault(
            "train.global_batch_size",
            f"{train.global_batch_size} samples are not a whole number of microbatches of {microbatch} "
            f"(train.micro_batch_size {train.micro_batch_size} x modules.{LANGUAGE}.layout.dp {language.dp}): "
            f"use a multiple of {microbatch}",
        )
    yield from _sequence_faults(cfg.data.sequence_length, language)
    microbatches, rest = divmod(train.global_batch_size, microbatch)
    if language.vpp > 1 and not rest and microbatches % language.pp:
        yield Fault(
            "train.global_batch_size",
            f"{train.global_batch_size} samples are {microbatches} microbatches of "
            f"{microbatch}; interleaving (modules.{LANGUAGE}.layout.vpp {language.vpp}) needs a multiple of pp "
            f"{language.pp}: use a multiple of {microbatch * language.pp}, or set vpp to 1",
        )
    if train.global_batch_size % microbatch == 0:
        yield from rampup_faults(cfg)
    for name, module in cfg.encoders.items():
        if module.balance == "samples" and microbatch % module.layout.dp:
            yield Fault(
                f"modules.{name}.layout.dp",
                f"dp {module.layout.dp} does not divide a microbatch of {microbatch} samples "
                f"(train.micro_batch_size {train.micro_batch_size} x modules.{LANGUAGE}.layout.dp {language.dp}): "
                f"use a divisor of {microbatch}",
            )


def _sequence_faults(length: int, language: LayoutConfig) -> Iterator[Fault]:
    key = f"modules.{LANGUAGE}.layout"
    chunks, tp = 2 * language.cp if language.cp > 1 else 1, language.tp if language.sp else 1
    if length % chunks:
        yield Fault(
            "data.sequence_length",
            f"{length} tokens are not {chunks} equal chunks, as {key}.cp {language.cp} needs: use a multiple of "
            f"{chunks * tp}, or another cp",
        )
    elif length % (chunks * tp):
        of = f"tp {tp}" if chunks == 1 else f"2 x cp {language.cp} x tp {tp}"
        yield Fault(
            "data.sequence_length",
            f"{length} tokens are not equal parts of {of}, and {key}.sp splits sequences: use a multiple of "
            f"{chunks * tp}, or set sp to false",
        )
