"""URLs of objects, with the parts of `pathlib` that callers use, and metadata of objects."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

from data.errors import DataError

OBJECTS = ("s3", "gs", "az")
"""Schemes of object storage, for reading and writing."""
WEB = ("http", "https")
"""Schemes of web servers, for reading."""

EXTRA = "pip install 'mimo-train[remote]'"
_REMEDIES = {
    "sftp": "mount it (sshfs) or copy it (rsync) first, and name the folder",
}
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://([^/]*)/*(.*)", re.IGNORECASE | re.DOTALL)
_ENCODED = re.compile(r"[%?#\s]")
"""Characters that must be percent-encoded in a URL."""
_ALIASES = {"s3a": "s3", "gcs": "gs", "azure": "az"}


@dataclass(frozen=True, order=True)
class Url:
    """A location such as `s3://bucket/some/object`. Without `__fspath__`, opening it as a file fails at once."""

    scheme: str
    host: str
    """Bucket, container, or server with its port."""
    path: str
    """Decoded path without outer slashes; empty: the whole host."""
    seen: tuple[int, str] | None = field(default=None, compare=False)
    """Size and tag of the object, if a listing gave them: reads require this version."""

    @classmethod
    def parse(cls, text: str) -> Url:
        """Parse a URL. Raises DataError without a location, or for credentials, a query or an empty part."""
        match = _URL.fullmatch(text)
        if match is None or not match[2]:
            raise DataError(f"{_shown(text)}: is no URL such as s3://bucket/folder")
        scheme, host, path = match[1].lower(), match[2], match[3].rstrip("/")
        if "@" in host:
            raise DataError(
                f"{scheme}://...@{_shown(host.rpartition('@')[2])}/{_shown(path)}: has credentials in it: give them by "
                "the environment, see docs/checkpoints.md#object-storage"
            )
        if scheme in WEB:
            path = _decoded(text)
        if "//" in path or any(part in (".", "..") for part in path.split("/")):
            raise DataError(f"{_shown(text)}: has an empty part, . or .. in its path: give it without")
        return cls(_ALIASES.get(scheme, scheme), host, path)

    def __str__(self) -> str:
        path = _ENCODED.sub(lambda match: quote(match[0]), self.path) if self.scheme in WEB else self.path
        return f"{self.scheme}://{self.host}/{path}"

    def __truediv__(self, name: str) -> Url:
        return Url(self.scheme, self.host, f"{self.path}/{name}" if self.path else name)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> Url:
        """The URL without the last part of the path."""
        return Url(self.scheme, self.host, self.path.rpartition("/")[0])

    @property
    def parents(self) -> list[Url]:
        """All parents, the nearest first."""
        return [self.parent, *self.parent.parents] if self.path else []

    def with_name(self, name: str) -> Url:
        """Return the URL with another last part."""
        return self.parent / name

    def absolute(self) -> Url:
        """Return itself."""
        return self

    def resolve(self) -> Url:
        """Return itself."""
        return self


def require_scheme(url: Url) -> None:
    """Raise DataError for a URL without a client."""
    if url.scheme not in OBJECTS + WEB:
        supported = ", ".join(f"{scheme}://" for scheme in OBJECTS + WEB)
        remedy = _REMEDIES.get(url.scheme, "copy it to a local disk or to one of these first")
        raise DataError(f"{url}: {url.scheme}:// is not supported ({supported} are): {remedy}")


def _decoded(url: str) -> str:
    """Return the percent-decoded path of a web server's URL. Raises DataError."""
    if re.search("[?#]|%2f", url, re.IGNORECASE):
        raise DataError(f"{_shown(url)}: a URL with ?, # or %2F is not read: give one of a plain file")
    try:
        return unquote(url.partition("://")[2].partition("/")[2], errors="strict").strip("/")
    except UnicodeDecodeError as error:
        raise DataError(f"{url}: is no UTF-8 where it has percent signs: give one of a plain file") from error


def _shown(text: str) -> str:
    return re.split("[?#]", text, maxsplit=1)[0]


@dataclass(frozen=True)
class ObjectMeta:
    """Metadata of an object."""

    url: Url
    size: int
    tag: str
    """The etag, or size and modification time; differs for every content."""
    modified: float
    """Seconds since the epoch, by the server's clock; 0 if unknown."""

    @property
    def seen(self) -> tuple[int, str]:
        """`Url.seen`."""
        return self.size, self.tag


class Changed(OSError):
    """An object is not, or no longer, the requested one."""

    def __init__(self, url: Url) -> None:
        super().__init__(errno.ESTALE, "it has changed", str(url))


Place = Path | Url
"""A file or folder, local or remote."""


def is_url(text: object) -> bool:
    """True for a URL, False for a path."""
    return isinstance(text, Url) or (isinstance(text, str) and _URL.fullmatch(text) is not None)


def place_of(text: str | os.PathLike[str] | Url) -> Place:
    """Return the URL or path that a text names; `file://` is a path. Raises DataError as `Url.parse`."""
    if isinstance(text, Url):
        return text
    text = os.fspath(text)
    if not is_url(text):
        return Path(text)
    if text.lower().startswith("file://"):
        return Path(text[len("file://") :])
    return Url.parse(text)
