"""Telling the system which parts of files will be read, while that pays: what it has in memory needs no word."""

from __future__ import annotations

import os

_LOOKS = 256  # after which what they found decides
_FEW = 0.02  # share of them that was not in memory, below which nothing is told


class ReadAhead:
    """Of the files that one reader reads. Threads may use it together.

    Attributes:
        pays: whether ranges should be announced; while it does not, each read looks, so that it may again.
    """

    def __init__(self) -> None:
        self.pays = hasattr(os, "posix_fadvise")
        self._looked = self._cold = 0

    def announce(self, fd: int, offset: int, size: int) -> None:
        """Lets the system read a range of an open file. Raises OSError."""
        self._look(fd, offset)
        os.posix_fadvise(fd, offset, size, os.POSIX_FADV_WILLNEED)

    def reads(self, fd: int, offset: int) -> None:
        """A range is about to be read."""
        if not self.pays and hasattr(os, "posix_fadvise"):
            self._look(fd, offset)

    def _look(self, fd: int, offset: int) -> None:
        self._looked += 1
        self._cold += not _is_in_memory(fd, offset)
        if self._looked >= _LOOKS:
            self.pays = self._cold > _FEW * self._looked
            self._looked = self._cold = 0


def _is_in_memory(fd: int, offset: int) -> bool:
    """Whether a byte can be read at once; False where the file system does not say."""
    try:
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) >= 0
    except OSError:
        return False
