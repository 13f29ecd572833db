"""What torch's C++ prints. Imports no torch."""

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path

LEVEL = "TORCH_CPP_LOG_LEVEL"


def errors_only() -> None:
    """From now on C++ prints errors and no warnings, also where torch was imported before; does nothing where the user
    has chosen a level."""
    if LEVEL in os.environ:
        return
    os.environ[LEVEL] = "ERROR"
    if torch := sys.modules.get("torch"):
        # Torch reads the variable at its import. A torch that has no such function goes on to warn.
        with suppress(OSError, AttributeError):
            ctypes.CDLL(str(Path(torch.__path__[0], "lib", "libc10.so")))._ZN3c1011initLoggingEv()
