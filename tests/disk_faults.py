"""A disk that fails, or a kill, at one call of the functions that write checkpoints."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CALLS = ("open", "write", "fsync", "rename")


class DiskCalls:
    """Stands for the module `os` where checkpoints are written: counts its calls, and does something at one of them.

    Attributes:
        count: calls so far of `CALLS`.
        named: the function and the file of the newest call, as far as it names one.
    """

    def __init__(self, at: int = -1, act: Callable[[], Any] = lambda: None):
        """`act` is called in the place of call number `at`, and goes on with the call if it returns."""
        self.count, self._at, self._act = 0, at, act
        self.named = ""

    def __getattr__(self, name: str) -> Any:
        function = getattr(os, name)
        return self.counted(function) if name in CALLS else function

    def counted(self, function: Callable) -> Callable:
        def call(*args, **kwargs):
            self.count += 1
            self.named = " ".join([function.__name__.strip("_"), *(one.name for one in args if isinstance(one, Path))])
            if self.count - 1 == self._at:
                self._act()
            return function(*args, **kwargs)

        return call

    def install(self) -> "DiskCalls":
        """For this process."""
        from mimo_train.checkpoint.format import files

        files.os = self
        return self


@contextmanager
def disk_of(size: str, folder: Path) -> Iterator[Path]:
    """A file system of a size such as 256k in a folder; the test is skipped where none can be mounted."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
