"""Moments in fp32, bf16 or 8 bit.

8 bit: blocks of 256 elements with their largest magnitude in fp32 and one code per element, which names one of 256
fractions of it. The fractions are dense near 0, as in "8-bit Optimizers via Block-wise Quantization" (Dettmers et al.,
2022, arXiv:2110.02861). Both ends are in the table, so that quantising a value that was read gives the same codes:
checkpoints hold values, not codes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch

BLOCK = 256
"""Elements that share a scale."""

SCALE = "_scale"
"""Suffix of the name of a state's scales."""

State = dict[str, torch.Tensor]
"""What an optimizer keeps of a parameter, by name."""

OFFLOAD = "offload"
"""Key of a parameter group: true if its states are in pinned memory of the host between steps (`optim.offload`)."""


def moved_to_host(state: State) -> State:
    """Return a state in host memory, pinned if it comes from a GPU."""
    hosts = {
        name: torch.empty_like(value, device="cpu", pin_memory=value.is_cuda).copy_(value)
        for name, value in state.items()
    }
    return hosts


@contextmanager
def on_device(states: Sequence[State], device: torch.device, *, offloaded: bool) -> Iterator[Sequence[State]]:
    """Yield states on the device, and write them back to host memory if they are offloaded."""
    if not offloaded:
        yield states
        return
    copies = [
        {name: torch.empty_like(value, device=device).copy_(value, non_blocking=True) for name, value in state.items()}
        for state in states
    ]
    yield copies
    for state, copy in zip(states, copies, strict=True):
        for name, value in state.items():
            value.copy_(copy[name], non_blocking=True)


def part_of(state: State, first: int, last: int) -> State:
    """Return flat views of a range of elements, which begins at a multiple of `BLOCK`."""
    return {
        name: value.view(-1)[first // size : -(-last // size)]
        for name, value in state.items()
        for size in [BLOCK if name.endswith(SCALE) else 1]
    }


def add_moment(state: State, name: str, like: torch.Tensor, moments: str) -> None:
    """Add a moment of zeros for the elements of `like`. `moments`: fp32, bf16 or 8bit."""
    if moments == "8bit":
        zero = _nearest(torch.zeros(1, device=like.device), name)
        state[name] = zero.expand(like.numel()).clone()
        state[name + SCALE] = torch.zeros(-(-like.numel() // BLOCK), device=like.device)
    else:
        state[name] = torch.zeros_like(like, dtype=torch.bfloat16 if moments == "bf16" else torch.float32)


def read(state: State, name: str) -> torch.Tensor:
    """Return a moment in fp32: the stored tensor itself if it is, else a copy [numel]."""
    values, scales = state[name], state.get(name + SCALE)
    if scales is None:
        return values.float()
    fractions = _fractions(name, values.device).index_select(0, values.int())
    return fractions.mul_(scales.repeat_interleave(BLOCK)[: values.numel()])


def write(state: State, name: str, values: torch.Tensor) -> None:
    """Store what `read` returned, after changes."""
    stored, scales = state[name], state.get(name + SCALE)
    if scales is None:
        if stored is not values:
            stored.copy_(values)
        return
    flat = values.flatten()
    padded = torch.nn.functional.pad(flat, (0, scales.numel() * BLOCK - flat.numel())).view(-1, BLOCK)
    torch.amax(padded.abs(), dim=1, out=scales)
    fractions = padded / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    stored.copy_(_nearest(fractions.flatten()[: flat.numel()], name))


def _nearest(fractions: torch.Tensor, name: str) -> torch.Tensor:
    table = _fractions(name, fractions.device)
    codes = torch.bucketize(fractions, (table[1:] + table[:-1]) / 2, out_int32=True)
    if name.endswith("_sq"):
        codes.clamp_min_(1).mul_(fractions > 0)  # a square that became 0 would make a huge update
    return codes.to(torch.uint8)


@cache
def _fractions(name: str, device: torch.device) -> torch.Tensor:
    """Return the sorted table of a moment: [255] with signs, or [256] for squares. Fractions grow by equal factors from
    a smallest one, so that the relative error is the same at every size: at most 3.3 % of squares, 4.7 % of others."""
    smallest, count = (-7, 255) if name.endswith("_sq") else (-5, 127)
    positive = torch.logspace(smallest, 0, count, dtype=torch.float64).float()
    negative = positive[:0] if name.endswith("_sq") else -positive.flip(0)
    return torch.cat([negative, torch.zeros(1), positive]).to(device)
