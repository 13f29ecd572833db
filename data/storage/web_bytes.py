"""A file of a web server, read from its beginning to its end, also where the server knows no ranges.

What was cut is asked for again from where it was cut; of a server that begins anew, the first part is passed over.
"""

from __future__ import annotations

import errno
import http.client
import io
import re
import urllib.error
import urllib.request
from typing import Any

from data.errors import ShardError
from data.reading import READS
from data.storage.retry import RETRIES, retrying
from data.storage.url import Url

PATIENCE = 60.0
"""Seconds without any byte, after which a connection is given up."""
_CODES = {401: errno.EACCES, 403: errno.EACCES, 404: errno.ENOENT, 410: errno.ENOENT}
_SKIP = 1 << 20
_NUMBER = re.compile(r"[0-9]{1,18}")


class WebBytes(io.RawIOBase):
    """The bytes of a URL.

    Raises:
        ReadError: from reads: they fail, after several tries.
        ShardError: from reads: the file is another one than it was when reading began.
    """

    def __init__(self, url: Url, retries: int = RETRIES, patience: float = PATIENCE) -> None:
        self._url, self._retries, self._patience = url, retries, patience
        self._answer: http.client.HTTPResponse | None = None
        self._at, self._tag = 0, ""
        self._size: int | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with READS.of(self._url):
            content = retrying(
                lambda: self._next(len(buffer)), f"{self._url}: cannot read it at byte {self._at}", self._retries
            )
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self._drop()
        super().close()

    def _next(self, size: int) -> bytes:
        try:
            if self._answer is None:
                self._answer = self._opened()
            content = self._answer.read(size)
            if not content and self._size is not None and self._at != self._size:
                raise OSError(errno.EIO, f"the answer ends after {self._at} of {self._size} bytes")
        except urllib.error.HTTPError as error:
            self._drop()
            raise OSError(_CODES.get(error.code, errno.EIO), f"the server says {error.code} {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            self._drop()
            raise OSError(errno.EIO, str(error) or type(error).__name__) from error
        self._at += len(content)
        return content

    def _opened(self) -> http.client.HTTPResponse:
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={self._at}-"} if self._at else {})
        request = urllib.request.Request(str(self._url), headers=headers)
        answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=self._patience)
        try:
            self._pass_over(answer)
        except BaseException:
            answer.close()
            raise
        return answer

    def _pass_over(self, answer: http.client.HTTPResponse) -> None:
        """Let the next byte of an answer be the one that is read next."""
        begin, size = self._place(answer)
        tag = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
        # Of one and the same file an answer may give the size, and the next not.
        if self._at and (tag != self._tag or (None not in (size, self._size) and size != self._size)):
            raise ShardError(f"{self._url}: the file changed while it was read. Start again when it stays as it is.")
        self._tag, self._size = tag, self._size if size is None else size
        while begin < self._at:
            passed = answer.read(min(_SKIP, self._at - begin))
            if not passed:
                raise OSError(errno.EIO, f"the answer ends after {begin} bytes")
            READS.count += 1
            begin += len(passed)

    def _place(self, answer: http.client.HTTPResponse) -> tuple[int, int | None]:
        """(first byte of an answer, bytes of the file where they are known)."""
        length = answer.headers.get("Content-Length")
        if length is not None and not _NUMBER.fullmatch(length.strip()):
            raise OSError(errno.EIO, f"the server sent Content-Length: {length!r}, which is no number")
        if answer.status != http.client.PARTIAL_CONTENT:
            return 0, None if length is None else int(length)
        said = answer.headers.get("Content-Range", "")
        if not said.startswith(f"bytes {self._at}-"):
            raise OSError(errno.EIO, f"the server sent {said!r} for bytes from {self._at} on")
        whole = said.rpartition("/")[2].strip()
        if _NUMBER.fullmatch(whole):
            return self._at, int(whole)
        return self._at, None if length is None else self._at + int(length)

    def _drop(self) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.close()
