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
    ends with `close`, or with this process, however that ends. What it leaves behind after its own end stays. Where a
    part of a pipeline fails, all of it has failed.

    Raises:
        ShardError: there is no shell; when its output ends: the command ended with another exit code than 0.
    """

    def __init__(self, command: Command) -> None:
        self._command, self._count = command, 0
        self._ending_it = threading.Lock()
        try:
            self._guard = _Guard()
        except OSError as error:
            raise ShardError(f"{command}: cannot be started: {error}") from error
        try:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                ["bash", "-o", "pipefail", "-c", command.text],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            self._guard.dismiss()
            raise ShardError(f"{command}: cannot be started: {error}") from error
        self._guard.watch(self._process.pid)
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
                    code = 0 if content else self._ended()
                    break
                content += more
        if code:
            raise ShardError(f"{self._command}: {self._ending(code)} after {self._count:,} bytes{self._words()}")
        buffer[: len(content)] = content
        self._count += len(content)
        return len(content)

    def stop(self) -> None:
        """End the command, and all that it has started, also where the shell has ended before them; from any thread."""
        with self._ending_it:
            if self._process.returncode is None:  # nobody has waited for it: the number of its group is no other's
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        if not self.closed:
            self.stop()
            self._ended()
            self._listener.join(_PATIENCE)
            assert self._process.stdout is not None
            self._process.stdout.close()
        super().close()

    def _ended(self) -> int:
        """Its exit code, when it has ended."""
        if self._process.returncode is None:  # without taking its number from it, which `stop` may still need
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        with self._ending_it:
            code = self._process.wait()
        self._guard.dismiss()
        return code

    def _listen(self, stderr: IO[bytes]) -> None:
        with stderr:
            while said := os.read(stderr.fileno(), 1024):
                self._said.append(said)

    def _ending(self, code: int) -> str:
        if code < 0:
            named = {each.value: each.name for each in signal.Signals}
            return f"the command was ended by {named.get(-code, f'signal {-code}')}"
        return f"the command ended with exit code {code}"

    def _words(self) -> str:
        self._listener.join(_PATIENCE)
        said = b"".join(self._said).decode(errors="replace").strip()
        return f": {shown(' '.join(said[-_SAID:].split()))}" if said else ""


class _Guard:
    """A process that ends a group of processes when this process is gone: killed, it ends nothing itself."""

    _SCRIPT = 'read -r group && [ "$group" ] || exit; read -r || kill -KILL -- "-$group"'

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            ["bash", "-c", self._SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what ends the group of this process is not to end it first
        )

    def watch(self, group: int) -> None:
        self._write(f"{group}\n")

    def dismiss(self) -> None:
        """End it, and nothing else. May be called twice."""
        self._write("\n")
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # it was killed, or dismissed before
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
