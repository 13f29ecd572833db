"""What object storage and web servers have in common: lists, ranges, versions; and their errors as those of files."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from data.storage.url import Url


@dataclass(frozen=True)
class Found:
    """An object."""

    url: Url
    size: int
    """In bytes."""
    tag: str
    """Another one for every content: etag, or, where there is none, size and time of modification."""
    modified: float
    """Seconds since the epoch, by the server's clock; 0 where it does not say."""


class Changed(OSError):
    """An object is not, or no longer, the one that was asked for."""

    def __init__(self, url: Url) -> None:
        super().__init__(errno.ESTALE, "it is no longer what it was", str(url))


class Store(Protocol):
    """A bucket or server. Methods may be called from several threads.

    All raise FileNotFoundError, PermissionError, `Changed`, FileExistsError, or another OSError, with the URL as file
    name.
    """

    def list(self, folder: Url, *, deep: bool = True) -> Iterator[Found]:
        """Every object under a folder, at any depth, or, not `deep`, those in it; in order of name."""

    def look(self, url: Url) -> Found:
        """What is known of one object."""

    async def read(self, url: Url, start: int, size: int, tag: str = "") -> memoryview:
        """Bytes from `start` on, `size` or fewer: those that the object has. Raises `Changed` where it has another tag
        than the given one."""

    def put(self, url: Url, content: bytes, *, new: bool = False, instead_of: str = "") -> str:
        """Write an object at once; returns its tag.

        Args:
            new: raises FileExistsError where there is one.
            instead_of: raises `Changed` where the one there has another tag.
        """

    def upload(self, url: Url, parts: Iterable[bytes | memoryview], size: int) -> int:
        """Write an object of about `size` bytes in parts: none of it is there before all of it is. Returns its size."""

    def remove(self, urls: Iterable[Url]) -> None:
        """Remove objects; one that is not there is none."""


def named(error: BaseException, url: Url, code: int = errno.EIO) -> OSError:
    """An error of a library as one of files."""
    said = " ".join(str(error).split())
    return OSError(code, said[:_LONGEST] or type(error).__name__, str(url))


_LONGEST = 300
"""Characters of what a library says: some repeat themselves."""
