"""Non-finite gradients, weights, losses and inputs after a bad step, with their ranks and samples.

One bad image makes the loss of its microbatch and every gradient NaN. So inputs and weights are checked too: they
identify the module. Otherwise `train.on_nan=bisect` finds the origin.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from data.samples.protocol import MEDIA
from data.text_format import listed, plural
from mimo_train.config.parts import LANGUAGE
from mimo_train.models.parameters import global_names, modules_of
from mimo_train.models.sharding import shard_of
from mimo_train.training.step.batches import StepIterator
from mimo_train.training.step.losses import StepLosses
from mimo_train.training.step.pipeline import Pipeline

NAMES, PLACES, SAMPLES = 3, 4, 8
"""Most parameter names of a module and rank, places of a kind of finding, and samples of a microbatch and rank, in a
message; the replay file has all."""


@dataclass(frozen=True)
class Sample:
    """A training sample: its number in the order of the run, and where it is."""

    number: int
    shard: str
    key: str

    def __str__(self) -> str:
        return f"{Path(self.shard).name} {self.key} (number {self.number})"


@dataclass(frozen=True)
class BadTensors:
    """A module's parameters on a rank with non-finite gradients or weights."""

    module: str
    rank: int
    names: list[str]

    def __str__(self) -> str:
        count = plural(len(self.names), "parameter")
        return f"{self.module} on rank {self.rank} ({count}: {listed(self.names, NAMES)})"


@dataclass(frozen=True)
class BadMicrobatch:
    """A rank's part of a microbatch with a non-finite loss or input, and its samples."""

    module: str
    rank: int
    microbatch: int
    values: dict[str, str]
    """Values of losses by name; for an input its name, with the word `input`."""
    samples: list[Sample]

    def __str__(self) -> str:
        values = ", ".join(f"{name} {value}" for name, value in self.values.items())
        samples = listed([str(sample) for sample in self.samples], SAMPLES)
        return f"{self.module} on rank {self.rank}, microbatch {self.microbatch} ({values}): {samples}"


@dataclass
class Findings:
    """The non-finite values. Gradients are summed over data-parallel ranks; losses are each rank's own."""

    gradients: list[BadTensors] = field(default_factory=list)
    weights: list[BadTensors] = field(default_factory=list)
    losses: list[BadMicrobatch] = field(default_factory=list)
    inputs: list[BadMicrobatch] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Yield a line for each kind, causes first."""
        for what in ("inputs", "weights", "losses", "gradients"):
            if places := getattr(self, what):
                yield f"{what} not finite: {listed([str(place) for place in places], PLACES, between='; ')}"
        if not (self.inputs or self.weights or self.losses):
            yield "inputs, weights and the losses of all microbatches are finite: backward is at fault"


def gather(pipeline: Pipeline, losses: StepLosses, data: StepIterator) -> Findings:
    """Check the last step on all ranks and return the same findings on each. Collective."""
    bad_weights = _bad_names(_parameters(pipeline.model))
    local = Findings(
        [BadTensors(module, dist.get_rank(), names) for module, names in bad_gradients(pipeline.model).items()],
        [BadTensors(module, dist.get_rank(), names) for module, names in bad_weights.items()],
        bad_losses(losses, data),
        list(_bad_inputs(data)),
    )
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, local)
    return Findings(
        *([place for each in everyone for place in getattr(each, what)] for what in Findings.__dataclass_fields__)
    )


def bad_gradients(model: list) -> dict[str, list[str]]:
    """Return the names of this rank's parameters with non-finite gradients, by module."""
    gradients = {}
    for module, parameters in _parameters(model).items():
        gradients[module] = {
            name: gradient
            for name, value in parameters.items()
            if (gradient := getattr(value, "main_grad", None)) is not None  # frozen parameters have none
        }
    return _bad_names(gradients)


def bad_losses(losses: StepLosses, data: StepIterator) -> list[BadMicrobatch]:
    """Return the non-finite losses of this rank, with the samples of its part of their microbatches."""
    microbatches = []
    for microbatch, report in enumerate(losses.reports):
        sums = dict(zip(report, torch.stack([value[0] for value in report.values()]).tolist(), strict=True))
        bad = {name: str(value) for name, value in sums.items() if not math.isfinite(value)}
        if bad:
            numbers = data.current.numbers[microbatch][LANGUAGE]
            microbatches.append(BadMicrobatch(LANGUAGE, dist.get_rank(), microbatch, bad, _samples(data, numbers)))
    return microbatches


def are_finite(tensors: Iterable[torch.Tensor]) -> list[bool]:
    """For each tensor, return True if all its values on this rank are finite; one copy to the host."""
    flags = [shard_of(tensor)[0].detach().isfinite().all() for tensor in tensors]
    return torch.stack(flags).tolist() if flags else []


def _bad_inputs(data: StepIterator) -> Iterator[BadMicrobatch]:
    sizes = data.dataset.input_sizes
    for microbatch, batch in enumerate(data.current.microbatches):
        for module, inputs in batch.get("modality_inputs", {}).items():
            tensors = dict((inputs or {}).get(module, {}))
            media = tensors.pop(MEDIA, None)
            cached = {(item.sample, item.number) for item in media.items if item.features is not None} if media else ()
            for name, values in tensors.items():
                if not isinstance(values[0], torch.Tensor):
                    continue  # later stages of an encoder have only sizes
                # One value for each image, frame or audio item that was read, in the order of the samples.
                owners = [
                    number
                    for number, items in data.current.numbers[microbatch][module].items()
                    for _ in sizes(number, module, [item for item in items if (number, item) not in cached])
                ]
                bad = [owner for owner, good in zip(owners, are_finite(values), strict=True) if not good]
                if bad:
                    samples = _samples(data, dict.fromkeys(bad))
                    yield BadMicrobatch(module, dist.get_rank(), microbatch, {name: "input"}, samples)


def _samples(data: StepIterator, numbers: Iterable[int]) -> list[Sample]:
    located = ((number, *data.dataset.locate(number)) for number in numbers)
    return [Sample(number, str(shard), key) for number, shard, key in located]


def _parameters(model: list) -> dict[str, dict[str, torch.Tensor]]:
    """Return the parameters by module and global name; local names of different chunks may be equal."""
    return {
        module: {name: parameter for chunk in chunks for name, parameter in global_names(chunk).items()}
        for module, chunks in modules_of(model).items()
    }


def _bad_names(tensors: dict[str, dict[str, torch.Tensor]]) -> dict[str, list[str]]:
    return {
        module: bad
        for module, named in tensors.items()
        if (bad := [name for name, good in zip(named, are_finite(named.values()), strict=True) if not good])
    }
