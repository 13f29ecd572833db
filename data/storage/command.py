"""The output of a command as bytes of a shard: `pipe:COMMAND`, as WebDataset has it."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from data.errors import ShardError
from data.reading import READS
from data.shown import shown

PIPE = "pipe:"
_AT_LEAST = 512  # bytes that a read gives, but for the last
_SAID = 400  # characters of what a command says of its failure
_PATIENCE = 2.0  # seconds for the rest of what it says


@dataclass(frozen=True, order=True)
class Command:
    """A shard that is what a command writes."""

    text: str
    """For a shell."""

    def __str__(self) -> str:
        return PIPE + self.text

    @property
    def name(self) -> str:
        """Of the shard, in messages and fingerprints."""
        return str(self)


class CommandBytes(io.RawIOBase):
    """What a command writes to its standard output. It has nothing to read, and a group of processes of its own, which
    ends with `close`. Where a part of a pipeline fails, all of it has failed.

    Raises:
        ShardError: there is no shell; when its output ends: the command ended with another exit code than 0.
    """

    def __init__(self, command: Command) -> None:
        self._command, self._count = command, 0
        try:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                ["bash", "-o", "pipefail", "-c", command.text],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise ShardError(f"{command}: cannot be started: {error}") from error
        self._said: deque[bytes] = deque(maxlen=8)
        self._listener = threading.Thread(target=self._listen, args=(self._process.stderr,), daemon=True)
        self._listener.start()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        assert self._process.stdout is not None
        fd, content, code = self._process.stdout.fileno(), b"", 0
        with READS.of(self._command):
            while len(content) < min(_AT_LEAST, len(buffer)):  # who looks at the first bytes gets them together
                more = os.read(fd, len(buffer) - len(content))
                if not more:
                    code = 0 if content else self._process.wait()
                    break
                content += more
        if code:
            raise ShardError(f"{self._command}: {self._ending(code)} after {self._count:,} bytes{self._words()}")
        buffer[: len(content)] = content
        self._count += len(content)
        return len(content)

    def stop(self) -> None:
        """End the command, and all that it has started, if they still run; from any thread."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        if not self.closed:
            self.stop()
            self._process.wait()
            self._listener.join(_PATIENCE)
            assert self._process.stdout is not None
            self._process.stdout.close()
        super().close()

    def _listen(self, stderr: IO[bytes]) -> None:
        with stderr:
            while said := os.read(stderr.fileno(), 1024):
                self._said.append(said)

    def _ending(self, code: int) -> str:
        if code < 0:
            return f"the command was ended by {signal.Signals(-code).name}"
        return f"the command ended with exit code {code}"

    def _words(self) -> str:
        self._listener.join(_PATIENCE)
        said = b"".join(self._said).decode(errors="replace").strip()
        return f": {shown(' '.join(said[-_SAID:].split()))}" if said else ""
