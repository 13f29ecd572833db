"""Seconds of a step under the pipeline schedules: 1F1B over a tree of stages, and interleaved chunks.

A stage runs one operation at a time, in the order of Megatron-Core's schedule (Narayanan et al. 2021, arXiv 2104.04473,
section 2.2; warm-up as in 0.19.2, schedules.py:902), and waits for its inputs. Messages overlap with computation.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

_Operation = tuple[bool, int, int]
"""(is backward, model chunk, microbatch)."""


class Part(NamedTuple):
    """A part of a stage's work that differs between microbatches."""

    forward: float
    """Seconds for a share of 1."""
    backward: float
    shares: Sequence[float]
    """Share of each microbatch."""


class Stage(NamedTuple):
    """A pipeline stage."""

    forward: float
    """Seconds of one microbatch over all chunks of the stage; the mean if microbatches differ."""
    backward: float
    destination: int | None
    """Index of the stage that receives the output; None for the last stage."""
    send: float = 0.0
    """Seconds of a message to the destination, or of its gradient back."""
    parts: tuple[Part, ...] = ()
    """Work that differs between microbatches."""

    def seconds(self, microbatch: int) -> tuple[float, float]:
        """Return the seconds of forward and backward of one microbatch."""
        if not self.parts:
            return self.forward, self.backward
        return (
            sum(part.forward * part.shares[microbatch] for part in self.parts),
            sum(part.backward * part.shares[microbatch] for part in self.parts),
        )


def least_seconds(stages: Sequence[Stage], microbatches: float, chunks: int = 1) -> float:
    """Return a lower bound of `max(ends(...))`, exact for equal stages without messages. It adds the computation of a
    stage, the path of the first microbatch to it, and the path of the last gradient back."""
    before = [0.0] * len(stages)
    for at, stage in enumerate(stages):
        if stage.destination is not None:
            ways = stage.seconds(0)[0] + stage.seconds(-1)[1]
            way = before[at] + ways / chunks + 2 * stage.send
            before[stage.destination] = max(before[stage.destination], way)
    return max(way + microbatches * (stage.forward + stage.backward) for way, stage in zip(before, stages, strict=True))


def ends(stages: Sequence[Stage], microbatches: int, chunks: int = 1) -> list[float]:
    """Return the seconds from the start of a step to the end of each stage's last microbatch.

    Args:
        stages: sources before destinations.
        chunks: model chunks of each stage; above 1 the stages are one chain.
    """
    orders = [list(_order(stages, at, microbatches, chunks)) for at in range(len(stages))]
    needs = _needs(stages, chunks)
    done: dict[tuple[int, _Operation], float] = {}
    seconds = [[stage.seconds(microbatch) for microbatch in range(microbatches)] for stage in stages]
    at, clock = [0] * len(stages), [0.0] * len(stages)
    waiting = True
    while waiting:
        waiting, moved = False, False
        for number, order in enumerate(orders):
            while at[number] < len(order):
                operation = order[at[number]]
                ready = _ready(operation, number, needs, done)
                if ready is None:
                    break
                is_backward, _, microbatch = operation
                begin = max(clock[number], ready)
                clock[number] = done[number, operation] = begin + seconds[number][microbatch][is_backward] / chunks
                at[number], moved = at[number] + 1, True
            waiting = waiting or at[number] < len(order)
        assert moved or not waiting, "stages wait for each other"
    return clock


def ends_on_cores(
    stages: Sequence[Stage], ranks: Sequence[int], cores: float, microbatches: int, chunks: int = 1
) -> list[float]:
    """Return `ends` for stages whose `ranks` (a number for each) share `cores`. If more ranks compute than there are
    cores, all slow down equally, as under a fair scheduler."""
    orders = [list(_order(stages, at, microbatches, chunks)) for at in range(len(stages))]
    needs = _needs(stages, chunks)
    done: dict[tuple[int, _Operation], float] = {}
    at, ended, clock = [0] * len(stages), [0.0] * len(stages), 0.0
    left: dict[int, float] = {}
    """Remaining seconds of a stage's operation, if it runs alone."""
    while any(position < len(order) for position, order in zip(at, orders, strict=True)):
        begins = []
        for number, order in enumerate(orders):
            if number in left or at[number] == len(order):
                continue
            begin = _ready(order[at[number]], number, needs, done)
            if begin is not None and begin <= clock:
                is_backward, _, microbatch = order[at[number]]
                left[number] = stages[number].seconds(microbatch)[is_backward] / chunks
            elif begin is not None:
                begins.append(begin - clock)
        assert left or begins, "stages wait for each other"
        rate = min(1.0, cores / max(1, sum(ranks[number] for number in left)))
        following = min([*(seconds / rate for seconds in left.values()), *begins])
        clock += following
        for number in [*left]:
            left[number] -= following * rate
            if left[number] <= 1e-12:
                del left[number]
                done[number, orders[number][at[number]]] = ended[number] = clock
                at[number] += 1
    return ended


def _ready(
    operation: _Operation,
    stage: int,
    needs: "tuple[dict[tuple[int, int], list[_Need]], ...]",
    done: dict[tuple[int, _Operation], float],
) -> float | None:
    """Return the time at which the inputs of an operation are ready; None if not known yet."""
    is_backward, chunk, microbatch = operation
    ready = 0.0
    for other, other_chunk, late, same in needs[is_backward][stage, chunk]:
        # The last stage has the inputs of its gradient from its own forward pass.
        end = done.get((other, (is_backward and not same, other_chunk, microbatch)))
        if end is None:
            return None
        ready = max(ready, end + late)
    return ready


_Need = tuple[int, int, float, bool]
"""(stage, chunk, seconds of the message, True if a backward pass waits for the forward pass there)."""


def _needs(
    stages: Sequence[Stage], chunks: int
) -> tuple[dict[tuple[int, int], list[_Need]], dict[tuple[int, int], list[_Need]]]:
    forward: dict[tuple[int, int], list[_Need]] = {}
    backward: dict[tuple[int, int], list[_Need]] = {}
    last = len(stages) - 1
    for at, stage in enumerate(stages):
        sources = [(source, one.send) for source, one in enumerate(stages) if one.destination == at]
        for chunk in range(chunks):
            forward[at, chunk] = [(source, chunk, send, False) for source, send in sources]
            if at == 0 and chunk:
                forward[at, chunk] = [(last, chunk - 1, stages[0].send, False)]
            if stage.destination is not None:
                backward[at, chunk] = [(stage.destination, chunk, stage.send, False)]
            elif chunk < chunks - 1:
                backward[at, chunk] = [(0, chunk + 1, stages[0].send, False)]
            else:
                backward[at, chunk] = [(at, chunk, 0.0, True)]
    return forward, backward


def _stages_to_end(stages: Sequence[Stage], at: int) -> int:
    destination = stages[at].destination
    return 1 if destination is None else 1 + _stages_to_end(stages, destination)


def _order(stages: Sequence[Stage], at: int, microbatches: int, chunks: int) -> Iterator[_Operation]:
    left, number = _stages_to_end(stages, at), microbatches * chunks
    warm_up = left - 1 if chunks == 1 else 2 * (left - 1) + (chunks - 1) * len(stages)
    warm_up, group = min(warm_up, number), len(stages) * chunks

    def chunk_and_microbatch(step: int) -> tuple[int, int]:
        if chunks == 1:
            return 0, step
        # Groups of as many microbatches as there are stages, one chunk after the other.
        return step % group // len(stages), step // group * len(stages) + step % len(stages)

    def forward(step: int) -> _Operation:
        return (False, *chunk_and_microbatch(step))

    def backward(step: int) -> _Operation:
        chunk, microbatch = chunk_and_microbatch(step)
        return True, chunks - 1 - chunk, microbatch

    for step in range(warm_up):
        yield forward(step)
    for step in range(number - warm_up):
        yield forward(warm_up + step)
        yield backward(step)
    for step in range(number - warm_up, number):
        yield backward(step)
