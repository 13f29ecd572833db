"""Ranks of a CPU run that are forked from one process, which has imported the program for all of them.

Each rank would import it for itself, which takes longer than the rest of a small run. The launcher imports it once, and
forks a server off before it has a thread or a store of its own. For each rank the server forks a process that forks the
rank and ends, so that the rank becomes the launcher's child, as one that the launcher has started itself: its parent,
its exit code and the signals to it are the same. A process that has used CUDA cannot be forked: there, and where the
program cannot be imported, ranks start as before, as processes that import it themselves.
"""

import atexit
import ctypes
import importlib
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

from mimo_train.launch.collector import collector_waits
from mimo_train.launch.library_log import held

OPTION = "--forked="
"""Of this launcher, in front of torchrun's: with the run's `run.device`, `cpu` or `auto`."""
PROGRAM = "mimo_train.training.preload"
"""Imports all that a rank needs. By name, since it is above this package."""
ANSWER_SECONDS = 30
"""How long the launcher waits for the server, which answers at once unless it was stopped."""
_PDEATHSIG, _NAME, _CHILD_SUBREAPER = 1, 15, 36
"""Of Linux's prctl."""


class Start(NamedTuple):
    """What a rank needs to start."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    outputs: tuple[str | None, str | None]
    """Files of its standard output and error; None: the launcher's."""
    caught: frozenset[int] = frozenset()
    """Signals that the launcher has a handler for: a process of its own meets them with the system's default."""


class ForkedRank:
    """A child of the launcher, with the part of `subprocess.Popen` that torchrun uses."""

    def __init__(self, pid: int, module: str) -> None:
        self.pid, self._module = pid, module
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after so many seconds.
        """
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self._module, timeout or 0)
            time.sleep(0.02)
        return code


class ForkServer:
    """The launcher's side of the process that forks ranks.

    Args:
        said: what libraries have warned of while they were imported.
    """

    def __init__(self, said: list[str]) -> None:
        self.said = said
        self._connection, theirs = Pipe()
        launcher = os.getpid()
        with _adopting():
            pid = os.fork()
        if pid == 0:
            try:
                _serve(theirs, launcher)
            finally:
                os._exit(1)
        theirs.close()
        self._process = ForkedRank(pid, PROGRAM)

    def start(self, start: Start) -> ForkedRank | None:
        """A rank, which leads its session; None where the server has been killed, or does not answer."""
        caught = frozenset(number for number in signal.valid_signals() if callable(signal.getsignal(number)))
        with _adopting(), suppress(OSError, EOFError):
            self._connection.send(start._replace(caught=caught))
            if self._connection.poll(ANSWER_SECONDS):
                rank = ForkedRank(self._connection.recv(), start.module)
                self._connection.send(True)
                return rank
        self._end(within=0)
        return None

    def close(self) -> None:
        """End the server."""
        self._end(within=ANSWER_SECONDS)

    def _end(self, within: float) -> None:
        """Also of a rank that was forked, and that this process does not know of.

        Args:
            within: the seconds after which the server is killed.
        """
        self._connection.close()
        try:
            self._process.wait(within)
        except subprocess.TimeoutExpired:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()


def open_server(device: str) -> ForkServer | None:
    """Import the program, and fork the server off; None where ranks are not forked.

    Args:
        device: `run.device`; with `auto` the ranks are forked where torch finds no CUDA.
    """
    if sys.platform != "linux":
        return None
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by the import; for several ranks torchrun sets the same
    try:
        # Frozen: collections in ranks would only copy its pages.
        with held() as said, collector_waits():
            importlib.import_module(PROGRAM)
    except Exception:  # each rank meets it too, and says so where errors of ranks are said
        return None
    if threading.active_count() > 1 or (device != "cpu" and _has_cuda()):
        return None
    try:
        return ForkServer(said)
    except OSError:  # the system refuses a process, or to adopt one
        return None


def start_from(server: ForkServer, handler_class: Any) -> None:
    """Patches torch's class of one rank, so that it has the rank from the server."""
    original = handler_class._popen

    def popen(handler: Any, command: Sequence[str], environment: dict[str, str]) -> Any:
        start = _start_of(command, environment, (handler._stdout, handler._stderr))
        return (server.start(start) if start else None) or original(handler, command, environment)

    handler_class._popen = popen


def _start_of(command: Sequence[str], environment: dict[str, str], outputs: Sequence[Any]) -> Start | None:
    """None for a command that is no module of Python as this process runs it: with other options, under numactl."""
    python, *rest = command
    options = {"-P": sys.flags.safe_path, "-u": getattr(sys.stdout, "write_through", False)}
    while rest and options.get(rest[0]):
        del rest[0]
    if python != sys.executable or len(rest) < 2 or rest[0] != "-m":
        return None
    files = tuple(None if file is None else file.name for file in outputs)
    return Start(rest[1], rest[2:], environment, (files[0], files[1]))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _prctl(option: int, value: Any) -> None:
    """
    Raises:
        OSError: the system refuses.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


@contextmanager
def _adopting() -> Iterator[None]:
    """A block in which this process becomes the parent of what its children leave behind."""
    _prctl(_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(_CHILD_SUBREAPER, 0)


def _serve(connection: Connection, launcher: int) -> NoReturn:
    """The server: forks ranks until the launcher closes the connection, or ends in whatever way."""
    # Signals to the launcher, and to its group, are not for the server: they wait until a rank has its own handlers.
    given = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    os.setsid()
    _prctl(_PDEATHSIG, signal.SIGKILL)
    for name in os.listdir("/proc/self/fd"):  # as Popen closes for a process what is not its own
        if int(name) > 2 and int(name) != connection.fileno():
            with suppress(OSError):  # that of the list
                os.close(int(name))
    while os.getppid() == launcher:
        try:
            start = connection.recv()
        except EOFError:
            break
        if not _forked(start, connection, given):
            break
    os._exit(0)


def _forked(start: Start, connection: Connection, signals: set[int | signal.Signals]) -> bool:
    """Fork a rank that the launcher adopts; whether the two have met over the connection.

    Args:
        signals: blocked in the rank.
    """
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            between = os.getpid()
            if os.fork() == 0:
                os.close(reader)
                code = 1
                try:
                    code = _become(start, between, signals, connection, writer)
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                finally:
                    os._exit(code)
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(between, 0)
    with open(reader, "rb") as file:
        return bool(file.read())


def _become(start: Start, between: int, signals: set[int | signal.Signals], connection: Connection, writer: int) -> int:
    """Run a rank, in the state that a process has which `subprocess.Popen` has started in a session of its own; returns
    its exit code."""
    while os.getppid() == between:  # a rank that asks for a signal at the end of its parent means the launcher
        time.sleep(0.001)
    os.setsid()
    for number in signal.valid_signals():
        if number in start.caught or callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, signals)
    try:
        connection.send(os.getpid())  # by now the launcher can send signals to it, and to its session
        connection.recv()
    except (OSError, EOFError):
        return 1  # the launcher has given the server up, and starts this rank in another way
    connection.close()
    os.write(writer, b"met")
    os.close(writer)
    for descriptor, output in enumerate(start.outputs, 1):
        if output is not None:
            file = os.open(output, os.O_WRONLY | os.O_APPEND)
            os.dup2(file, descriptor)
            os.close(file)
    os.environ.clear()
    os.environ.update(start.environment)
    _prctl(_NAME, f"rank {start.environment.get('RANK', '')}".encode())
    _own_state()
    return _run(start)


def _own_state() -> None:
    """What libraries make once in a process, at their import or at a first call."""
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        # A forked process makes its pool of threads anew at the first call; two threads at once abort it (torch 2.11).
        torch.set_num_threads(torch.get_num_threads())


def _run(start: Start) -> int:
    """Run the program to the end of its threads and its callbacks for the exit; returns its exit code."""
    sys.argv = [start.module, *start.arguments]
    code: Any = 0
    try:
        runpy.run_module(start.module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    return (code or 0) & 0xFF
