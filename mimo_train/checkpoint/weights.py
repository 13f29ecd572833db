"""Reads weights of a checkpoint into the tensors that a rank holds."""

from collections.abc import Iterable

import torch

from mimo_train.checkpoint.format.index import Key
from mimo_train.checkpoint.format.read import Reader, Wanted
from mimo_train.checkpoint.format.spans import Span
from mimo_train.checkpoint.local_shards import Held


def fill_weights(reader: Reader, wanted: Iterable[tuple[Held, Key]]) -> None:
    """Read tensors, each by the name that it has in the checkpoint.

    Raises:
        Damage: a block that is needed is damaged.
    """
    fill(
        reader,
        [
            (key, span, one.tensor.detach().view(-1)[first:last])
            for one, key in wanted
            for first, last, span in one.spans(0, one.tensor.numel())
        ],
    )


def fill(reader: Reader, targets: list[tuple[Key, Span, torch.Tensor]]) -> None:
    """Read spans into tensors of any device, [span.numel] each; errors as of `fill_weights`."""
    staged = [
        (into, into if into.device.type == "cpu" else torch.empty_like(into, device="cpu")) for *_, into in targets
    ]
    reader.fill(Wanted(key, span, here) for (key, span, _), (_, here) in zip(targets, staged, strict=True))
    for into, here in staged:
        if into is not here:
            into.copy_(here)
