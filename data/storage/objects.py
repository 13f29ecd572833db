"""Object storage and web servers through obstore, with errors like those of files.

Credentials, regions and endpoints come from the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

from data.storage.url import WEB, Changed, ObjectMeta, Url

PART, MOST_PARTS = 16 << 20, 9000
"""Bytes of an upload's part, and its maximum number of parts (S3 allows 10,000)."""
AT_ONCE = 4
"""Concurrent parts of one upload."""

_CLIENT = {"connect_timeout": "10s", "read_timeout": "60s", "timeout": "600s"}
_RETRIES = {
    "max_retries": 3,
    "retry_timeout": timedelta(seconds=60),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 2},
}
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_CODES: dict[type[BaseException], int] = {
    exceptions.PermissionDeniedError: errno.EACCES,
    exceptions.UnauthenticatedError: errno.EACCES,
    exceptions.AlreadyExistsError: errno.EEXIST,
    exceptions.NotSupportedError: errno.EOPNOTSUPP,
    exceptions.InvalidPathError: errno.EINVAL,
    PermissionError: errno.EACCES,
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
}


class ObjectStore:
    """A bucket of s3, gs or az, or a web server. Thread-safe.

    Methods raise FileNotFoundError, PermissionError, `Changed`, FileExistsError, or another OSError, with the URL as
    file name. Creating one raises OSError for invalid settings in the environment.
    """

    def __init__(self, url: Url) -> None:
        self._scheme = url.scheme
        self._versions: dict[str, tuple[str, str | None]] = {}
        options: Any = {"client_options": _CLIENT | {"allow_http": _is_plain(url)}, "retry_config": _RETRIES}
        try:
            if url.scheme in WEB:
                self._store: Any = HTTPStore(f"{url.scheme}://{url.host}", **options)
            elif url.scheme == "s3":
                endpoint = _endpoint("s3")
                self._store = S3Store(url.host, **({"endpoint": endpoint} if endpoint else {}), **options)
            else:
                self._store = (GCSStore if url.scheme == "gs" else AzureStore)(url.host, **options)
        except (exceptions.BaseError, ValueError) as error:
            raise _os_error(error, url, errno.EINVAL) from error

    def list(self, folder: Url, *, deep: bool = True) -> Iterator[ObjectMeta]:
        """Return the objects under a folder, or only directly in it if not `deep`, sorted by name."""
        try:
            if deep:
                pages = obstore.list(self._store, folder.path or None, chunk_size=1000)
                objects = [meta for page in pages for meta in page]
            else:
                objects = [*obstore.list_with_delimiter(self._store, folder.path or None)["objects"]]
        except (exceptions.BaseError, OSError) as error:
            raise _as_os_error(error, folder) from error
        found = [self._meta(Url(folder.scheme, folder.host, meta["path"]), meta) for meta in objects]
        return iter(sorted(found, key=lambda one: one.url))

    def look(self, url: Url) -> ObjectMeta:
        """Return size, tag and time of an object."""
        try:
            meta = obstore.head(self._store, url.path)
        except (exceptions.BaseError, OSError) as error:
            raise _as_os_error(error, url) from error
        found = self._meta(url, meta)
        if self._scheme not in WEB:
            self._versions[url.path] = found.tag, meta.get("version")
        return found

    async def read(self, url: Url, start: int, size: int, tag: str = "") -> memoryview:
        """Return up to `size` bytes from `start`, as many as the object has. Raises `Changed` for another tag."""
        options: dict[str, Any] = {"range": (start, start + size)}
        if tag.startswith('"'):  # weak tags never match
            options["if_match"] = tag
        try:
            answer = await obstore.get_async(self._store, url.path, options=options)
            meta, (first, last) = answer.meta, answer.range
            if tag and self._meta(url, meta).tag != tag:
                raise Changed(url)
            content = memoryview(await answer.bytes_async())
        except (exceptions.BaseError, OSError) as error:
            raise _as_os_error(error, url) from error
        # Nothing else detects a header that contradicts the content.
        if first != start or last - first != len(content) or len(content) > size:
            raise OSError(errno.EIO, f"the server sent {len(content)} bytes as {first} to {last}", str(url))
        return content

    def put(self, url: Url, content: bytes, *, new: bool = False, instead_of: str = "") -> str:
        """Write an object in one request and return its tag. With `new`, raises FileExistsError if it exists. With
        `instead_of`, raises `Changed` if it has another tag."""
        mode: Any = "create" if new else "overwrite"
        if instead_of:
            tag, version = self._versions.get(url.path, (instead_of, None))
            mode = {"e_tag": instead_of, **({"version": version} if version and tag == instead_of else {})}
        try:
            result = obstore.put(self._store, url.path, content, mode=mode, use_multipart=False)
        except (exceptions.BaseError, OSError) as error:
            if new and isinstance(error, exceptions.PreconditionError):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(url)) from error
            raise _as_os_error(error, url) from error
        self._versions[url.path] = result["e_tag"] or "", result["version"]
        return result["e_tag"] or ""

    def upload(self, url: Url, parts: Iterable[bytes | memoryview], size: int) -> int:
        """Write an object of about `size` bytes in parts and return its size. It appears when it is complete."""
        sent = 0
        failed: list[BaseException] = []

        def counted() -> Iterator[bytes | memoryview]:
            nonlocal sent
            try:
                for part in parts:
                    sent += len(part)
                    yield part
            except BaseException as error:
                failed.append(error)
                raise

        part = max(PART, -(-size // MOST_PARTS))
        options: Any = {"use_multipart": True, "chunk_size": part, "max_concurrency": AT_ONCE}
        try:
            obstore.put(self._store, url.path, counted(), **options)
        except BaseException as error:
            if failed:
                raise failed[0] from None
            if isinstance(error, exceptions.BaseError | OSError):
                raise _as_os_error(error, url) from error
            raise
        return sent

    def remove(self, urls: Iterable[Url]) -> None:
        """Remove objects; missing ones are ignored."""
        urls = list(urls)
        try:
            obstore.delete(self._store, [url.path for url in urls])
        except FileNotFoundError:
            for url in urls if len(urls) > 1 else []:
                self.remove([url])
        except (exceptions.BaseError, OSError) as error:
            raise _as_os_error(error, urls[0]) from error

    def _meta(self, url: Url, meta: Any) -> ObjectMeta:
        modified, tag = meta["last_modified"].timestamp(), meta["e_tag"]
        if tag and self._scheme not in WEB and not tag.startswith(('"', "W/")):
            tag = f'"{tag}"'  # Azure quotes it in answers but not in lists
        return ObjectMeta(url, meta["size"], tag or f"{meta['size']} {modified:.6f}", modified)


def _endpoint(scheme: str) -> str:
    return next((value for name in _ENDPOINTS.get(scheme, ()) if (value := os.environ.get(name))), "")


def _os_error(error: BaseException, url: Url, code: int = errno.EIO) -> OSError:
    """Convert a library error to OSError. Some messages repeat themselves."""
    return OSError(code, " ".join(str(error).split())[:300] or type(error).__name__, str(url))


def _is_plain(url: Url) -> bool:
    """True if the user chose a connection without encryption, by scheme or endpoint."""
    return url.scheme == "http" or _endpoint(url.scheme).lower().startswith("http://")


def _as_os_error(error: BaseException, url: Url) -> OSError:
    if isinstance(error, Changed):
        return error
    if isinstance(error, exceptions.PreconditionError | exceptions.NotModifiedError):
        return Changed(url)
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), errno.EIO)
    return _os_error(error, url, code)
