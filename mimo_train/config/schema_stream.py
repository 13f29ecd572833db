"""What `data.stream` leaves of the other keys. Imports no torch."""

from collections.abc import Iterator
from typing import Any

from data.bounds import BOUNDS
from mimo_train.config.fault import Fault


def stream_faults(data: Any, epochs: float) -> Iterator[Fault]:
    """Keys that cannot be beside `data.stream`, or that need it.

    Args:
        data: the section, a `DataConfig`; epochs: `train.epochs`.
    """
    if not data.stream:
        if data.bounds.sample_bytes != BOUNDS.sample_bytes:
            yield Fault(
                "data.bounds.sample_bytes",
                f"is {data.bounds.sample_bytes}, and is for data.stream alone: leave it out, or set data.stream=true",
            )
        return
    if data.mix:
        yield Fault("data.mix", "is given, and data.stream reads one sequence of shards: name them in data.shards")
    elif not data.shards.strip():
        yield Fault("data.shards", "is empty: give a folder, a glob, a brace range, URLs, or pipe:COMMAND")
    if data.pack:
        yield Fault(
            "data.pack",
            "is true, and packs are planned from the lengths of texts, which data.stream does not know beforehand: set "
            "data.pack=false",
        )
    elif data.pad != "sequence":
        yield Fault(
            "data.pad",
            f"is {data.pad}, and rows are planned from the lengths of texts, which data.stream does not know "
            "beforehand: set data.pad=sequence",
        )
    if data.shuffle_block > 1:
        yield Fault(
            "data.shuffle_block",
            f"is {data.shuffle_block}, and data.stream puts shards in another order, and no samples: leave it out",
        )
    for name, given in (("validation_fraction", data.validation_fraction), ("split", data.split)):
        if given:
            yield Fault(
                f"data.{name}",
                f"is {given}, and data.stream cannot leave out samples: give data.validation_shards, which are indexed",
            )
    if data.exhausted == "stop":
        yield Fault(
            "data.exhausted",
            "is stop, and how many samples a stream has is not known beforehand: set data.exhausted=repeat, and the "
            "length of the run by train.iters",
        )
    if 0 < data.max_bad_samples < 1:
        yield Fault(
            "data.max_bad_samples",
            f"is a fraction, {data.max_bad_samples:g}, and how many samples a stream has is not known beforehand: give "
            "a whole number",
        )
    if epochs:
        yield Fault(
            "train.epochs",
            f"is {epochs:g}, and how many samples a stream has is not known beforehand: give train.iters",
        )
