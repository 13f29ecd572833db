"""Records of a rank: its kind, its results or its failure, and source lines."""

import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

from data.errors import DataError
from encoders.errors import EncoderError
from mimo_train.config.errors import UserError
from mimo_train.layout.ranks import RunLayout

ROOT = Path(__file__).resolve().parents[3]
_OWN = tuple(f"{ROOT}/{package}/" for package in ("mimo_train", "encoders", "data"))
_HERE = f"{Path(__file__).resolve().parent}/"
_CORE = "/megatron/core/"


def source_line(file: str, number: int) -> str:
    """Return `file:line` of the program or of Megatron-Core; empty for other files."""
    if file.startswith(_OWN) and not file.startswith(_HERE):
        return f"{file.removeprefix(f'{ROOT}/')}:{number}"
    at = file.find(_CORE)
    return f"{file[at + 1 :]}:{number}" if at >= 0 else ""


def source_lines(most: int) -> list[str]:
    """Return `file:line` of the `most` innermost frames of the program and of Megatron-Core, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    texts: list[str] = []
    while frame is not None and len(texts) < most:
        if text := source_line(frame.f_code.co_filename, frame.f_lineno):
            texts.append(text)
        frame = frame.f_back
    return texts


def innermost_line() -> str:
    """Return the innermost line; for Megatron-Core with the calling line of the program."""
    texts = source_lines(12)
    if not texts:
        return "?"
    caller = next((text for text in texts if not text.startswith("megatron/")), "")
    return texts[0] if caller in ("", texts[0]) else f"{texts[0]} < {caller}"


ALL_KINDS = "all-kinds"


@dataclass(frozen=True)
class Kind:
    """Ranks that run the same code on tensors of the same sizes, and one of them."""

    rank: int
    """The rank to run."""
    name: str
    """Its modules and their stages."""
    number: int
    """Ranks of this kind."""


def kinds_of(layout: RunLayout) -> list[Kind]:
    """Return the lowest rank of each combination of modules and their stages."""
    first: dict[str, int] = {}
    number: dict[str, int] = {}
    for rank in range(layout.world_size):
        name = layout.kind_of(rank)
        first.setdefault(name, rank)
        number[name] = number.get(name, 0) + 1
    return [Kind(rank, name, number[name]) for name, rank in first.items()]


def selected_kinds(layout: RunLayout, ranks: str) -> list[Kind]:
    """Return the kinds that `--ranks` selects: `all-kinds`, or ranks separated by commas.

    Raises:
        UserError: `ranks` is neither, or there is no such rank.
    """
    kinds = kinds_of(layout)
    if ranks == ALL_KINDS:
        return kinds
    numbers = {kind.name: kind.number for kind in kinds}
    selected = []
    for text in ranks.split(","):
        if not text.strip().isdecimal() or int(text) >= layout.world_size:
            raise UserError(f"--ranks: {text!r} is not one of the ranks 0 to {layout.world_size - 1}, nor {ALL_KINDS}")
        rank = int(text)
        selected.append(Kind(rank, layout.kind_of(rank), numbers[layout.kind_of(rank)]))
    return selected


@dataclass(frozen=True)
class RankResult:
    """The results of a rank."""

    kind: Kind
    device: str
    """cuda or cpu."""
    peak: int
    """Bytes of tensors on the device over all steps and evaluations, after the set-up."""
    categories: dict[str, int]
    """Bytes at the peak."""
    lines: list[tuple[str, str, int]]
    """(category, line, bytes) at the peak, the largest first."""
    groups: list[tuple[str, int]]
    """(description, ranks) of every process group."""
    messages: dict[str, tuple[int, int]]
    """(number, bytes) of the last step, by operation and group size."""
    flops: int
    """FLOPs of the last step."""
    kernels: dict[str, tuple[int, int]]
    """(kernels, kernels without fusions) of a layer of each kind, forward and backward, for one microbatch."""
    waits: dict[str, int]
    """Times that the host waited for the device in the last step, by reason and line."""
    waits_inside: dict[str, int]
    """Waits between the first microbatch and the last."""
    evaluated: bool
    seconds: float
    resident: int
    """Peak memory of the process, in bytes."""


@dataclass(frozen=True)
class RankFailure:
    """A rank that fails."""

    kind: Kind
    what: str
    line: str
    """The innermost line of the program that raised it; empty: none."""
    trace: str

    @classmethod
    def of(cls, kind: Kind, error: BaseException) -> "RankFailure":
        """Return the failure for an exception; user errors need no line and no traceback."""
        if isinstance(error, (UserError, DataError, EncoderError)):
            return cls(kind, str(error), "", "")
        text = str(error).strip() or type(error).__name__
        if "found two different devices" in text:
            text = f"a tensor on the CPU meets one on the device: {text}".replace("meta", "cuda:0")
        trace = "".join(traceback.format_exception(error))
        return cls(kind, f"{type(error).__name__}: {text}", _line_of(error.__traceback__), trace)


def _line_of(trace: TracebackType | None) -> str:
    innermost = ""
    while trace is not None:
        text = source_line(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        innermost = text if text and not text.startswith("megatron/") else innermost
        trace = trace.tb_next
    return innermost
