"""Jobs: functions that run in a process each, forked from one that has imported the program, within a time limit."""

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
LAST_LINES = 12
"""Lines of a traceback that are shown."""
ENVIRONMENT = {
    # is_available() then asks NVML. If an import asked CUDA, forked processes could not use the device.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # One rank on one machine: no network is searched.
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONUNBUFFERED": "1",
}
"""Variables of jobs, unless the user has set them."""
NO_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}
"""So that fp32 is fp32: Transformer Engine asks for TF32 whatever torch's own switches say."""


@dataclass(frozen=True)
class Outcome:
    """The result of a job.

    Attributes:
        state: ok; failed; ended, at its time limit; or skipped, by the caller.
        value: the value that an ok job returned.
        text: the last lines of the traceback, the time limit, or what is missing.
    """

    state: str
    value: Any = None
    text: str = ""


class Jobs:
    """Runs jobs one after the other; a context manager.

    Args:
        seconds: time limit of all jobs together.
    """

    def __init__(self, seconds: float):
        self._seconds, self._deadline = seconds, time.monotonic() + seconds
        self._number, self._method = 0, "forkserver"

    def __enter__(self) -> "Jobs":
        path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
        with ExitStack() as stack:
            stack.enter_context(patch.dict(os.environ, ENVIRONMENT | os.environ | NO_TF32 | {"PYTHONPATH": path}))
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mimo-gpu-")))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stack.close()

    def run(self, function: Callable[..., Any], limit: float, **arguments: Any) -> Outcome:
        """Call `function(**arguments)` in a process of its own.

        Args:
            function: of a module; its arguments and its result are plain data.
            limit: seconds after which the process and its children are killed.
        """
        outcome = self._run(self._method, function, limit, arguments)
        # An import has opened the device, or has ended the server: each job imports for itself from here on.
        if outcome.state == "unforkable":
            self._method = "spawn"
            outcome = self._run(self._method, function, limit, arguments)
        return outcome

    def _run(self, method: str, function: Callable[..., Any], limit: float, arguments: dict[str, Any]) -> Outcome:
        limit = min(limit, self._deadline - time.monotonic())
        if limit <= 0:
            return Outcome("ended", text=f"not run: the {self._seconds:g} s for all sections are over")
        self._number += 1
        log = self.folder / f"{self._number}.log"
        context = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(["benchmarks.gpu.preload"])  # ignored by a server that runs already
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_job, args=(sender, str(log), function, arguments))  # type: ignore[attr-defined]
        try:
            process.start()
        except (OSError, EOFError):
            return Outcome("unforkable" if method == "forkserver" else "failed", text=traceback.format_exc())
        sender.close()
        try:
            if not receiver.poll(limit):
                text = f"after {limit:.3g} s"
                return Outcome("ended", text=f"{text}; last lines of its log:\n{_tail(log)}" if _tail(log) else text)
            return receiver.recv()
        except EOFError:
            process.join()
            code = process.exitcode
            how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return Outcome("failed", text=f"{_tail(log)}\n{how}".strip())
        finally:  # after Ctrl-C too
            _kill_session(process.pid)
            process.join()
            receiver.close()


def _job(sender: Connection, log: str, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """The main function of a job's process. It ends at once: threads and peers are not waited for."""
    os.setsid()
    parent = multiprocessing.parent_process()
    # A job must not hold a device when nobody waits for it.
    threading.Thread(target=lambda: (parent.join(), _kill_session(os.getpid())), daemon=True).start()
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1), os.dup2(output, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    torch = sys.modules.get("torch")
    try:
        if torch is not None and arguments.get("device") == "cuda" and torch.cuda._is_in_bad_fork():
            outcome = Outcome("unforkable")
        else:
            outcome = Outcome("ok", function(**arguments))
    except BaseException:
        outcome = Outcome("failed", text=_last_lines(traceback.format_exc()))
    sys.stdout.flush(), sys.stderr.flush()
    sender.send(outcome)
    os._exit(0)


def _kill_session(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # of a job that has not begun its session yet, the process
        try:
            return kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _tail(log: Path) -> str:
    return _last_lines(log.read_text(errors="replace")) if log.exists() else ""


def _last_lines(text: str) -> str:
    """The last lines that are not empty, with short paths."""
    for prefix in (f"{ROOT}/", f"{sys.prefix}/"):
        text = text.replace(prefix, "")
    return "\n".join([line for line in text.splitlines() if line.strip()][-LAST_LINES:])
