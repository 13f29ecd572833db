"""Jobs: functions that run in a process of their own each, within a time, and commands likewise."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LAST_LINES = 12
"""Lines of a traceback that are shown."""
END_SECONDS = 10
"""How long a killed job may take to be gone."""
ENVIRONMENT = {
    # is_available() then asks NVML: asking CUDA, as imports do, would keep forked processes from using it.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # One rank on one machine: no network is looked for.
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONUNBUFFERED": "1",
}
"""What jobs and commands run with, where the user has not set it."""
NO_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}
"""Of jobs, so that fp32 is fp32: Transformer Engine asks for TF32 whatever torch's own switches say."""


@dataclass(frozen=True)
class Outcome:
    """How a job went.

    Attributes:
        state: ok; skipped, for want of something; failed; ended, because its time was over.
        value: what it returned, if it is ok.
        text: what is missing, why it failed (the last lines of its traceback), or after how long it was ended.
    """

    state: str
    value: Any = None
    text: str = ""


class Jobs:
    """Runs jobs one after the other; a context manager.

    Args:
        seconds: for all jobs together.
        import_seconds: for the imports that all of them share; where they take longer, or end the process, each job
            imports for itself.
    """

    def __init__(self, seconds: float, import_seconds: float = 120):
        self._deadline, self._seconds, self._import_seconds = time.monotonic() + seconds, seconds, import_seconds
        self._scratch = tempfile.TemporaryDirectory(prefix="mimo-gpu-check-")
        self._server: subprocess.Popen | None = None
        self._cannot_serve = False
        self._buffer, self._number = b"", 0
        self.folder = Path(self._scratch.name)
        """For what jobs write; removed at the end."""

    def __enter__(self) -> "Jobs":
        return self

    def __exit__(self, *_exception) -> None:
        self._stop_server()
        self._scratch.cleanup()

    def run(self, function: Callable, limit: float, **arguments: Any) -> Outcome:
        """`function(**arguments)` in its own process; both are JSON, or names of it.

        Args:
            limit: seconds after which the process is ended.
        """
        if self._within(limit) <= 0:
            return self._no_time()
        if self._server is None and not self._cannot_serve:
            self._cannot_serve = not self._start_server()
        if self._cannot_serve:
            return self.run_alone(function, limit, **arguments)
        job, limit = self._job(function, arguments), self._within(limit)
        self._server.stdin.write(json.dumps(job).encode() + b"\n")
        self._server.stdin.flush()
        ends = time.monotonic() + limit
        started = self._answer(ends)
        ended = started and self._answer(ends)
        if ended:
            return _outcome(job, ended["status"])
        if started:
            _end_session(started["pid"])
        if not started or not self._answer(time.monotonic() + END_SECONDS):
            self._stop_server()
        return _ended(limit, Path(job["log"]))

    def run_alone(self, function: Callable, limit: float, **arguments: Any) -> Outcome:
        """As `run`, in a process that has imported nothing yet."""
        job = self._job(function, arguments)
        module = "benchmarks.gpu_check.fork_server"
        found = self._execute([sys.executable, "-P", "-m", module, json.dumps(job)], limit, Path(job["log"]), NO_TF32)
        return _outcome(job, found.value) if found.state == "ok" else found

    def command(self, command: list[str], limit: float) -> Outcome:
        """A command in the checkout; its value is its exit code and what it printed."""
        _, log = self._files()
        found = self._execute(command, limit, log)
        return Outcome("ok", value=(found.value, log.read_text(errors="replace"))) if found.state == "ok" else found

    def _execute(self, command: list[str], limit: float, log: Path, variables: dict[str, str] | None = None) -> Outcome:
        limit = self._within(limit)
        if limit <= 0:
            return self._no_time()
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=_environment() | (variables or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            return Outcome("ok", value=process.wait(timeout=limit))
        except subprocess.TimeoutExpired:
            return _ended(limit, log)
        finally:  # after Ctrl-C too
            if process.poll() is None:
                _end_session(process.pid)
                process.wait()

    def _job(self, function: Callable, arguments: dict[str, Any]) -> dict[str, Any]:
        out, log = self._files()
        name = f"{function.__module__}:{function.__qualname__}"
        return {"function": name, "arguments": arguments, "out": str(out), "log": str(log)}

    def _within(self, limit: float) -> float:
        return min(limit, self._deadline - time.monotonic())

    def _no_time(self) -> Outcome:
        return Outcome("ended", text=f"not run: the {self._seconds:g} s for all checks are over")

    def _files(self) -> tuple[Path, Path]:
        self._number += 1
        return self.folder / f"{self._number}.json", self.folder / f"{self._number}.log"

    def _start_server(self) -> bool:
        self._server = subprocess.Popen(
            [sys.executable, "-P", "-m", "benchmarks.gpu_check.fork_server"],
            env=_environment() | NO_TF32,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        if self._answer(time.monotonic() + self._within(self._import_seconds)):
            return True
        self._stop_server()
        return False

    def _answer(self, ends: float) -> dict[str, Any] | None:
        """The next line of the server; None if it does not come in time, or it has died."""
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._server.stdout], [], [], max(0, ends - time.monotonic()))
            piece = os.read(self._server.stdout.fileno(), 65536) if ready else b""
            if not piece:
                return None
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _stop_server(self) -> None:
        if self._server is not None:
            _end_session(self._server.pid)
            self._server.wait()
            self._server.stdin.close()
            self._server.stdout.close()
        self._server, self._buffer = None, b""


def _environment() -> dict[str, str]:
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    return ENVIRONMENT | os.environ | {"PYTHONPATH": path}


def _end_session(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # it has ended meanwhile, or has not begun its session
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _outcome(job: dict[str, Any], status: int) -> Outcome:
    """Of a job whose process has ended."""
    out, log = Path(job["out"]), Path(job["log"])
    if not out.exists():
        return Outcome("failed", text=f"{_tail(log)}\n{_how(status)}".strip())
    result = json.loads(out.read_text())
    if "missing" in result:
        return Outcome("skipped", text=result["missing"])
    if "error" in result:
        return Outcome("failed", text=_last_lines(result["error"]))
    return Outcome("ok", value=result["value"])


def _ended(limit: float, log: Path) -> Outcome:
    text = f"after {limit:.3g} s"
    return Outcome("ended", text=f"{text}; its last words:\n{_tail(log)}" if _tail(log) else text)


def _how(status: int) -> str:
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"


def _tail(log: Path) -> str:
    return _last_lines(log.read_text(errors="replace")) if log.exists() else ""


def _last_lines(text: str) -> str:
    """The last lines that say something, with short paths."""
    for long in (f"{ROOT}/", f"{sys.prefix}/"):
        text = text.replace(long, "")
    return "\n".join([line for line in text.splitlines() if line.strip()][-LAST_LINES:])
