"""Standard output of a run: whoever reads it may have gone, or the disk behind it may be full, and training goes on."""

import os
import sys
from contextlib import suppress
from typing import TextIO


def show(text: str, end: str = "\n") -> None:
    """Print a line; where that cannot be, nothing of this process is printed any more."""
    try:
        print(text, end=end, flush=True)
    except OSError:
        to_nowhere(sys.stdout)


def to_nowhere(stream: TextIO) -> None:
    """Let what goes to a stream that cannot be written, and what is left in its buffer, be lost without an error."""
    with suppress(OSError, ValueError):  # one without a file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
