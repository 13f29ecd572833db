"""Which line of the program, or of Megatron-Core, does something."""

import sys
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[3]
_OWN = tuple(f"{ROOT}/{package}/" for package in ("mimo_train", "encoders", "data"))
_HERE = f"{Path(__file__).resolve().parent}/"
_CORE = "/megatron/core/"


def short(file: str, number: int) -> str:
    """`file:line` of the program or of Megatron-Core; empty for files of others."""
    if file.startswith(_OWN) and not file.startswith(_HERE):
        return f"{file.removeprefix(f'{ROOT}/')}:{number}"
    at = file.find(_CORE)
    return f"{file[at + 1 :]}:{number}" if at >= 0 else ""


def lines(most: int) -> list[str]:
    """`file:line` of the innermost frames of the program, of those who use it, and of Megatron-Core, from the inside
    out."""
    frame: FrameType | None = sys._getframe(1)
    found: list[str] = []
    while frame is not None and len(found) < most:
        text = short(frame.f_code.co_filename, frame.f_lineno)
        if text:
            found.append(text)
        frame = frame.f_back
    return found


def line() -> str:
    """The innermost line, and of Megatron-Core's the program's that it comes from."""
    found = lines(12)
    if not found:
        return "?"
    own = next((each for each in found if not each.startswith("megatron/")), "")
    return found[0] if own in ("", found[0]) else f"{found[0]} < {own}"
