"""The batch of a run: batch sizes, ramp-up (`train.rampup_batch_size`) and packed rows (`data.pack`).

Ramp-up follows Megatron: [first, increment, samples] takes (global_batch_size - first) / increment steps up at equal
distances in consumed samples. The batch has its full size once more than `samples` are consumed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from data.text_format import plural
from mimo_train.config.errors import Fault
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import LayoutConfig

KEY = "train.rampup_batch_size"


@dataclass(frozen=True)
class Batch:
    """Batch sizes of a step and of a microbatch, and their ramp-up."""

    global_batch_size: int
    """Samples of a step at full size."""
    micro_batch_size: int
    """Samples of a microbatch on one data-parallel rank of the language model."""
    replicas: int
    """Data-parallel ranks of the language model."""
    first: int = 0
    """Samples of the first step; 0: no ramp-up."""
    increment: int = 0
    ramp_samples: int = 0
    """Consumed samples at which the ramp ends."""

    @classmethod
    def of(cls, cfg: ConfigContainer) -> "Batch":
        """Return the batch of a config without `batch_faults`."""
        train = cfg.train
        replicas = cfg.language.layout.dp
        return cls(train.global_batch_size, train.micro_batch_size, replicas, *train.rampup_batch_size)

    @property
    def microbatch_samples(self) -> int:
        """Samples of one microbatch over all data-parallel ranks."""
        return self.micro_batch_size * self.replicas

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step at full size."""
        return self.global_batch_size // self.microbatch_samples

    def size_at(self, consumed: int) -> int:
        """Return the samples of the step that starts after `consumed` samples."""
        if not self.first or consumed > self.ramp_samples:
            return self.global_batch_size
        steps_up = (self.global_batch_size - self.first) // self.increment
        if not steps_up or not self.ramp_samples:
            return self.global_batch_size
        grown = self.first + int(consumed / (self.ramp_samples / steps_up)) * self.increment
        return min(self.global_batch_size, grown)

    def sizes(self) -> Iterator[int]:
        """Yield every batch size of a step, in order."""
        if self.first:
            yield from range(self.first, self.global_batch_size, self.increment)
        yield self.global_batch_size

    def samples_of(self, steps: int, consumed: int = 0) -> int:
        """Return the samples of the first `steps` steps after `consumed` samples."""
        before = consumed
        for done in range(steps):
            if not self.first or consumed > self.ramp_samples:
                return consumed - before + (steps - done) * self.global_batch_size
            consumed += self.size_at(consumed)
        return consumed - before

    def steps_within(self, samples: int, consumed: int = 0) -> int:
        """Return the number of steps after `consumed` samples until `samples` samples are consumed in total."""
        steps = 0
        while self.first and consumed <= self.ramp_samples:
            consumed += self.size_at(consumed)
            if consumed > samples:
                return steps
            steps += 1
        return steps + max(0, samples - consumed) // self.global_batch_size

    def steps_of(self, samples: int) -> int:
        """Return the smallest number of steps with at least `samples` samples."""
        steps = self.steps_within(samples)
        return steps + (self.samples_of(steps) < samples)


def rampup_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    """Yield faults of `train.rampup_batch_size`, for a run whose full batch size has none."""
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
    wrong = [size for size in Batch.of(cfg).sizes() if size % unit]
    if wrong:
        interleaved = f" x modules.{LANGUAGE}.layout.pp {language.pp}" if language.vpp > 1 else ""
        yield Fault(
            KEY,
            f"a step of {plural(wrong[0], 'sample')} is not a multiple of {unit} (train.micro_batch_size "
            f"{train.micro_batch_size} x modules.{LANGUAGE}.layout.dp {language.dp}{interleaved}): use multiples of "
            f"{unit}",
        )


def batch_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    """Yield faults of batch sizes and sequence length with the parallel sizes of the modules."""
    train, language = cfg.train, cfg.language.layout
    if min(train.global_batch_size, train.micro_batch_size, cfg.data.sequence_length) < 1:
        return  # their own keys report it
    microbatch = train.micro_batch_size * language.dp
    if train.global_batch_size % microbatch:
        yield Fault(
            "train.global_batch_size",
            f"{train.global_batch_size} samples are not a whole number of microbatches of {microbatch} "
            f"(train.micro_batch_size {train.micro_batch_size} x modules.{LANGUAGE}.layout.dp {language.dp}): "
            f"use a multiple of {microbatch}",
        )
    yield from sequence_faults(cfg.data.sequence_length, language)
    microbatches, rest = divmod(train.global_batch_size, microbatch)
    if language.vpp > 1 and not rest and microbatches % language.pp:
        yield Fault(
            "train.global_batch_size",
            f"{train.global_batch_size} samples are {plural(microbatches, 'microbatch')} of "
            f"{microbatch}; interleaving (modules.{LANGUAGE}.layout.vpp {language.vpp}) needs a multiple of pp "
            f"{language.pp}: use a multiple of {microbatch * language.pp}, or set vpp to 1",
        )
    if train.global_batch_size % microbatch == 0:
        yield from rampup_faults(cfg)
    for name, module in cfg.encoders.items():
        if module.balance == "samples" and microbatch % module.layout.dp:
            yield Fault(
                f"modules.{name}.layout.dp",
                f"dp {module.layout.dp} does not divide a microbatch of {plural(microbatch, 'sample')} "
                f"(train.micro_batch_size {train.micro_batch_size} x modules.{LANGUAGE}.layout.dp {language.dp}): "
                f"use a divisor of {microbatch}",
            )


def sequence_faults(length: int, language: LayoutConfig) -> Iterator[Fault]:
    """Yield faults of sequences of `length` tokens that are split over ranks."""
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


def pack_length(cfg: ConfigContainer) -> int:
    """Return the maximum number of tokens of the samples in a packed row."""
    return cfg.data.pack_length or cfg.train.micro_batch_size * cfg.sample_length


def has_balancing_loss(llm: LlmSpec) -> bool:
    """True if the loads of experts add to the loss."""
    return llm.num_experts > 0 and llm.router_balancing != "none" and llm.router_aux_loss > 0


def packing_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    """Yield faults of packing (`data.pack`), or of its keys without it."""
    data, llm = cfg.data, cfg.llm
    if not data.pack:
        if data.pack_length:
            yield Fault("data.pack_length", f"is {data.pack_length}, and data.pack is false: set data.pack to true")
        return
    if data.pad == "sequence":
        yield Fault("data.pad", "is sequence, one sample in each row, and data.pack is true: set one of them only")
    if 0 < data.pack_length < cfg.sample_length:
        answers = f"{cfg.traits.answers} x " if cfg.traits.answers > 1 else ""
        yield Fault(
            "data.pack_length",
            f"{data.pack_length} tokens do not hold the longest sample, of {answers}data.sequence_length "
            f"{data.sequence_length}: use at least that, better twice",
        )
    if has_balancing_loss(llm) and llm.router_balancing != "aux_loss":
        what = "each row" if llm.router_balancing == "seq_aux_loss" else "ranks with as many tokens in each microbatch"
        yield Fault(
            f"modules.{LANGUAGE}.llm.router_balancing",
            f"{llm.router_balancing} would balance {what}, and a row of data.pack is several samples: use aux_loss or "
            "none",
        )
