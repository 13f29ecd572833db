"""What a dry run found, in plain values and in words. Imports no torch."""

import traceback
from dataclasses import dataclass
from types import TracebackType

from data.errors import DataError
from data.text_format import plural, shown_lines
from encoders.errors import EncoderError
from mimo_train.config.errors import UserError
from mimo_train.config.schema import ConfigContainer
from mimo_train.layout.kernels import compiled_modules
from mimo_train.preflight.dry_run.kinds import Kind
from mimo_train.preflight.dry_run.places import short

LINES = 6
"""Lines of the program that are named for a peak."""


@dataclass(frozen=True)
class Found:
    """What one rank did."""

    kind: Kind
    device: str
    """cuda or cpu."""
    peak: int
    """Bytes of tensors on the device over all steps, evaluation and save, after the set-up."""
    categories: dict[str, int]
    """Bytes of the peak."""
    lines: list[tuple[str, str, int]]
    """(category, line, bytes) of the peak, the largest first."""
    groups: list[tuple[str, int]]
    """(description, ranks) of every process group."""
    messages: dict[str, tuple[int, int]]
    """(number, bytes) of the last step, by operation and size of the group."""
    flops: int
    """Of the last step."""
    waits: dict[str, int]
    """Of the host for the device in the last step, by what and line."""
    waits_inside: dict[str, int]
    """Those of them that were between the first microbatch and the last."""
    evaluated: bool
    saved: int
    """Bytes of this rank's part of a checkpoint; 0 where the run saves none."""
    loaded: str
    """Checkpoint that the run would continue from, or begin with weights of; empty: none."""
    seconds: float
    resident: int
    """Largest memory of the process, in bytes."""


@dataclass(frozen=True)
class Failed:
    """A rank that fails."""

    kind: Kind
    what: str
    line: str
    """The innermost line of the program that it comes from; empty: none."""
    trace: str

    @classmethod
    def of(cls, kind: Kind, error: BaseException) -> "Failed":
        """From what was raised; an error that a user can cause says by itself what to change."""
        if isinstance(error, (UserError, DataError, EncoderError)):
            return cls(kind, str(error), "", "")
        text = str(error).strip() or type(error).__name__
        if "found two different devices" in text:
            text = f"a tensor on the CPU meets one on the device: {text}".replace("meta", "cuda:0")
        trace = "".join(traceback.format_exception(error))
        return cls(kind, f"{type(error).__name__}: {text}", _line_of(error.__traceback__), trace)


def _line_of(trace: TracebackType | None) -> str:
    found = ""
    while trace is not None:
        text = short(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        found = text if text and not text.startswith("megatron/") else found
        trace = trace.tb_next
    return found


def head_of(cfg: ConfigContainer, ranks: int, world: int) -> str:
    """What is about to be run.

    Args:
        ranks: that are tried, of so many.
    """
    said = "the CPU" if cfg.run.device == "cpu" else "CUDA, of which none is touched"
    head = f"Dry run of {ranks} of {plural(world, 'rank')}, as on {said}"
    if names := ", ".join(compiled_modules(cfg)):
        head += f"\nNOT TRIED: the compiler; layers of {names}, which the run compiles (train.compile), are as without"
    return head


def text_of(found: Found | Failed, estimate: int) -> str:
    """A paragraph.

    Args:
        estimate: bytes, as `check` reckons them from sizes alone.
    """
    kind = found.kind
    head = f"rank {kind.rank}: {kind.name}" + (f" (one of {kind.number:,} such ranks)" if kind.number > 1 else "")
    if isinstance(found, Failed):
        at = [f"  at {found.line}"] if found.line else []
        return "\n".join([head, f"  FAILS: {shown_lines(found.what)}", *at, *_indented(found.trace)])
    ratio = f"; {found.peak / estimate:.2f} of the estimate of {size(estimate)}" if estimate else ""
    lines = [
        head,
        f"  memory of tensors at the peak: {size(found.peak)}{ratio}",
        "    " + ", ".join(f"{name} {size(held)}" for name, held in sorted(found.categories.items(), key=_most)),
        *(f"    {size(held):>10}  {category}, made at {line}" for category, line, held in found.lines[:LINES]),
        f"  process groups: {len(found.groups)} ("
        + ", ".join(f"{description} {ranks}" for description, ranks in found.groups)
        + ")",
        f"  a step: {found.flops:.4g} floating point operations",
        *(f"    {number:,} x {name}, {size(nbytes)}" for name, (number, nbytes) in found.messages.items()),
        "  the host waits for the device in a step: " + (_counted(found.waits) or "never"),
    ]
    if found.waits_inside:
        lines.append("  WARNING: it waits between microbatches: " + _counted(found.waits_inside))
    if found.loaded:
        lines.append(f"  {found.loaded}: tensors are there, in these shapes")
    done = "trained" + (", evaluated" if found.evaluated else "") + (f", saved {size(found.saved)}" * bool(found.saved))
    lines.append(f"  {done} in {found.seconds:.0f} s, {size(found.resident)} of this machine's memory")
    return "\n".join(lines)


def _most(item: tuple[str, int]) -> int:
    return -item[1]


def _counted(waits: dict[str, int]) -> str:
    return "; ".join(f"{number} x {what}" for what, number in waits.items())


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in text.splitlines()]


def size(nbytes: float) -> str:
    """Bytes in the largest unit that they have one of."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes:.0f} B"
