"""Reading again after an I/O error: a full table of files, a server that is away for a while, a stale handle.

An error of the machine says nothing about a sample: it is tried again, and then the run ends. Only what was read and
cannot be understood is a bad sample.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable

from data.errors import ReadError

_log = logging.getLogger(__name__)

RETRIES = 5
"""Times that a read is tried again; with the pauses in between 15.5 seconds."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds; each is twice the one before
_FINAL = frozenset(
    [errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG]
)
"""What no waiting changes."""


def retrying[Result](work: Callable[[], Result], what: str, retries: int = RETRIES) -> Result:
    """The result of `work`, which is done again up to `retries` times after an OSError.

    Args:
        what: for messages, with shard and byte: "PATH: cannot read 10 bytes at byte 20".

    Raises:
        ReadError: it failed each time, or for a reason that does not pass.
    """
    for tried in range(retries + 1):
        try:
            return work()
        except OSError as error:
            said = f"{what}: {_words(error)}"
            if error.errno in _FINAL:
                raise ReadError(said) from error
            if tried == retries:
                raise ReadError(
                    f"{said}; tried {tried + 1} times. It is an error of the storage or of this machine, not of a "
                    "sample: mend it and start again, or raise data.read_retries"
                ) from error
            pause = min(_FIRST_PAUSE * 2**tried, _LONGEST_PAUSE)
            _log.warning("%s; again in %g s (%d of %d)", said, pause, tried + 1, retries)
            time.sleep(pause)
    raise AssertionError(retries)


def _words(error: OSError) -> str:
    name = errno.errorcode.get(error.errno or 0, "")
    return f"{error.strerror or error}{f' ({name})' if name else ''}"
