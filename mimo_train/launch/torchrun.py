"""Starts the ranks of one node: torchrun, with a graceful stop.

``python -m mimo_train.launch.torchrun [torchrun options] -m mimo_train.cli train CONFIG ...`` takes torchrun's own
options. What it adds to torchrun:

- SIGTERM, SIGINT, SIGHUP or SIGUSR1 is sent to each rank once, as SIGTERM, and the ranks have ``MIMO_GRACE_SECONDS``
  (default 120) to finish their step, save and exit 0; then the launcher exits 0 too. Torchrun itself exits with an
  error and kills remaining ranks after 30 s. A second SIGINT (Ctrl-C) a second
  later or more ends the ranks at once.
- When a rank fails, the others, which wait for it in a collective, are ended ``FAILURE_SECONDS`` later, not after 30 s.
- The rank's own error is the last output: one line names the rank, instead of torchrun's two tracebacks.
- ``--max-restarts N`` starts a run that has failed again, from its newest checkpoint, after a time that doubles; the
  same failure at the same step twice ends it (``restarts``). Torchrun itself starts it again at once. Several nodes
  meet before each start: all start again, or none.
- A launcher that is killed leaves no ranks (``supervisor``) and no temporary files (``scratch``) behind.
- A MASTER_PORT that is in use ends the launchers of all nodes, or of one, with one message (``meeting``).
- ``--forked=DEVICE``, the first option, forks the ranks from one process that has imported the program (``forked``).

It imports no torch at module level: its signal handlers are installed before that import begins.
"""

import ctypes
import gc
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, ClassVar

from mimo_train.config.errors import UserError
from mimo_train.flight.recorder import START
from mimo_train.flight.watch import HANG_CODE, hand_down, say
from mimo_train.launch.cpp_log import errors_only
from mimo_train.launch.exit_signal import is_repeat
from mimo_train.launch.forked import OPTION, open_server, start_from
from mimo_train.launch.import_guard import require_own_packages, working_directory_last
from mimo_train.launch.library_log import hand_on
from mimo_train.launch.rendezvous import meet, require_free
from mimo_train.launch.restarts import (
    RESTART,
    RESTARTS,
    STOPPED_CODE,
    Restarts,
    failure_of,
    first_wait,
    run_dir_of,
    stopped_code,
)
from mimo_train.launch.shutdown import grace_seconds
from mimo_train.launch.supervisor import Supervisor
from mimo_train.launch.temp_dir import FLIGHT, scratch_folder

FAILURE_SECONDS = 5
ASKED_FOR = {
    16: "a loss was wrong twice: start the run again on another machine, which makes the step again and compares",
    17: "a loss could not be trusted: the messages above say whether a machine is at fault",
    HANG_CODE: "the run hung, the report above says where: the same command continues from the newest checkpoint",
}
"""Exit codes with which ranks end a run on purpose, by `train.rerun` and `run.hang_report_seconds`."""
HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class _Waiting:
    """In the place of torch's context between two attempts: there are no ranks."""

    subprocess_handlers: ClassVar[dict[int, Any]] = {}


class Ranks:
    """The running ranks of this node, as far as signals are concerned.

    Args:
        grace_seconds: how long the ranks may take to finish after a stop was requested.
    """

    def __init__(self, grace_seconds: float) -> None:
        self.grace_seconds = grace_seconds
        self.context: Any = None  # torch's PContext, once the ranks have started
        self.supervisor: Supervisor | None = None
        self.starting = False
        self.stop_asked = False
        self._stop_asked_at = 0.0  # monotonic
        self.ended: dict[int, str] = {}
        """Processes of ranks that this launcher has killed, and why."""
        self._early: int | None = None  # a signal that came while the ranks were being started

    def ask_to_stop(self, signum: int, _frame: object) -> None:
        """Handler of the signals that stop a run: sends SIGTERM to the ranks, once."""
        if self.starting:
            self._early = signum
        elif self.context is None:
            sys.exit(128 + signum)  # nothing runs yet, and nothing is to be saved
        elif not self.stop_asked:
            self.stop_asked, self._stop_asked_at = True, time.monotonic()
            say(
                f"{signal.Signals(signum).name}: the ranks finish their step and save, for at most "
                f"{self.grace_seconds:g} s (MIMO_GRACE_SECONDS)"
            )
            signal.setitimer(signal.ITIMER_REAL, self.grace_seconds)
            self._signal(signal.SIGTERM)
        elif signum == signal.SIGINT and not is_repeat(self._stop_asked_at):
            say("SIGINT again: ending the ranks now")
            self._kill("SIGINT came twice")

    def started(self, context: Any) -> None:
        """Called when the ranks have started; handles a signal that arrived meanwhile.

        Args:
            context: torch's object of the running ranks.
        """
        self.context, self.starting = context, False
        if self.supervisor is not None:
            self.supervisor.started(handler.proc.pid for handler in context.subprocess_handlers.values())
        if self.stop_asked:  # torchrun has started ranks again meanwhile: these do not know
            self._signal(signal.SIGTERM)
        if self._early is not None:
            early, self._early = self._early, None
            self.ask_to_stop(early, None)

    def stopped_within(self, seconds: float) -> bool:
        """Wait before a restart; whether a stop was requested meanwhile."""
        self.context, deadline = _Waiting(), time.monotonic() + seconds
        while time.monotonic() < deadline and not self.stop_asked:
            time.sleep(0.1)
        # As before the first start: a signal while nodes wait for each other ends the launcher. One that came before
        # this line has set what is returned.
        self.context = None
        return self.stop_asked

    def end_of_grace(self, _signum: int, _frame: object) -> None:
        """Handler of the timer: ends the ranks that are still there."""
        say(f"the ranks did not finish within {self.grace_seconds:g} s (MIMO_GRACE_SECONDS): ending them")
        self._kill(f"it did not finish within {self.grace_seconds:g} s after a stop was asked for (MIMO_GRACE_SECONDS)")

    def _kill(self, why: str) -> None:
        handlers = self.context.subprocess_handlers.values()
        self.ended |= {handler.proc.pid: why for handler in handlers if handler.proc.poll() is None}
        self._signal(signal.SIGKILL)

    def _signal(self, signum: signal.Signals) -> None:
        # To the rank alone for a graceful stop: the workers that read its data must live until it has finished.
        # To its whole session, which torchrun gives each rank, for an end.
        send = os.killpg if signum == signal.SIGKILL else os.kill
        for handler in self.context.subprocess_handlers.values():
            if handler.proc.poll() is None:
                send(handler.proc.pid, signum)


def main(arguments: list[str] | None = None) -> int:
    """Launches the ranks and waits for them.

    Args:
        arguments: torchrun's options and the command of a rank; those of the process when None.

    Returns:
        0 if every rank exited 0, also after a requested stop; otherwise the exit code of the rank that failed
        first, 1 if a signal ended it.

    Raises:
        UserError: MIMO_GRACE_SECONDS is not a positive number, other packages hide ours, or MASTER_PORT is in use.
    """
    working_directory_last()
    require_own_packages()
    hand_down()
    ranks = Ranks(grace_seconds())
    for signum in HANDED_ON:
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # nohup says that it is to be ignored
            signal.signal(signum, ranks.ask_to_stop)
    signal.signal(signal.SIGALRM, ranks.end_of_grace)

    arguments, server = list(sys.argv[1:] if arguments is None else arguments), None
    if arguments and arguments[0].startswith(OPTION):
        server = open_server(arguments.pop(0).removeprefix(OPTION))

    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    if server is not None:
        start_from(server, SubprocessHandler)
    _adapt(SubprocessContext, ranks)
    if "LOGLEVEL" not in os.environ:
        for name in [*logging.root.manager.loggerDict]:
            if name.startswith("torch.distributed"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with ExitStack() as ends, scratch_folder() as folder:  # torchrun's own would be left behind
            if server is not None:
                ends.callback(server.close)
                hand_on(server.said, folder)
            # SIGQUIT alone is left to torchrun: it ends the run at once.
            options = run.parse_args(["--signals-to-handle=SIGQUIT", f"--log-dir={folder}", *arguments])
            _meet(options)
            with closing(Supervisor(ranks.grace_seconds, folder)) as ranks.supervisor:
                return _attempts(lambda: run.run(options), options, ranks, folder)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for signum in HANDED_ON:  # all is done: a late signal must not turn the exit code into its own
            signal.signal(signum, signal.SIG_IGN)


def _attempts(attempt: Callable[[], object], options: Any, ranks: Ranks, folder: Path) -> int:
    """Starts the ranks, again after failures if `--max-restarts` says so; returns the exit code."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    restarts, name = Restarts(options.max_restarts, first_wait()), options.rdzv_id
    os.environ.pop(RESTARTS, None)
    if options.max_restarts:
        os.environ[RESTARTS] = str(options.max_restarts)
    options.max_restarts = 0
    while True:
        try:
            attempt()
        except ChildFailedError as error:
            code = _report(error.failures, ranks, folder)
            if ranks.stop_asked or not restarts.number:
                return code
            first = min(error.failures.values(), key=lambda failure: failure.timestamp)
            seconds, why = restarts.after(failure_of(first.exitcode, folder))
        else:
            return 0
        say(why)
        gc.collect()  # the store of this attempt, which has the port
        try:
            # As before the first start: a signal while nodes wait for each other ends the launcher.
            ranks.context = None
            _meet(options, again=True, leaves=seconds is None)
        except UserError as error:
            if seconds is not None:
                say(str(error))
            return code
        if seconds is None or ranks.stopped_within(seconds):
            return code
        (folder / FLIGHT).unlink(missing_ok=True)
        os.environ[RESTART] = str(restarts.made)
        # What nodes have left in a store for the attempt before is not for this one.
        options.rdzv_id = f"{name}-{restarts.made}"


def _meet(options: Any, *, again: bool = False, leaves: bool = False) -> None:
    """Meets the launchers of other nodes where torchrun will open its store, and tells the ranks what is new of this
    start.

    Raises:
        UserError: as of `meet`.
    """
    os.environ.pop(START, None)  # of whoever has started this launcher
    fewest, _, most = options.nnodes.partition(":")
    if options.rdzv_backend != "static" or options.standalone or options.rdzv_endpoint or fewest != (most or fewest):
        return
    nodes, port = int(fewest), int(options.master_port)
    if nodes > 1:
        node, address = int(options.node_rank), options.master_addr
        os.environ[START] = meet(address, port, nodes, node, again=again, leaves=leaves)
    elif port and not leaves:
        require_free(port, again=again)


def _adapt(context_class: Any, ranks: Ranks) -> None:
    """Patches torch's class of running ranks: it notifies ``ranks`` when they have started, and waits less for the
    others when one has failed, and is quiet when all have ended well."""
    start, close = context_class._start, context_class._close

    def started(self: Any) -> None:
        ranks.starting = True
        start(self)
        ranks.started(self)

    def closed(self: Any, death_sig: signal.Signals, timeout: int = 30) -> None:
        handlers = self.subprocess_handlers.values()
        if handlers and all(handler.proc.poll() == 0 for handler in handlers):
            # The launcher that has torchrun's store may leave first: the others' C++ would tell of it.
            errors_only()
        close(self, death_sig, min(timeout, FAILURE_SECONDS))

    context_class._start, context_class._close = started, closed


def _report(failures: dict[int, Any], ranks: Ranks, folder: Path) -> int:
    """Print which rank failed first, and return its exit code. The other ranks failed or were ended because of it.

    Args:
        folder: the launcher's.
    """
    rank, failure = min(failures.items(), key=lambda item: item[1].timestamp)
    if failure.exitcode in ASKED_FOR:
        say(f"exit code {failure.exitcode}: {ASKED_FOR[failure.exitcode]}. All ranks of this node have ended.")
        return failure.exitcode
    if failure.exitcode == stopped_code():
        say(f"exit code {failure.exitcode} ({STOPPED_CODE}): the run was stopped before its last step, and has saved.")
        return failure.exitcode
    if failure.pid in ranks.ended:
        how = f"was ended by this launcher: {ranks.ended[failure.pid]}; what it had not saved is trained again"
    elif ranks.stop_asked and failure.exitcode == -signal.SIGTERM:
        how = "was stopped before training began: nothing was saved"
    elif failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        how = f"was killed by {name}" + (" (out of memory, or killed by hand)" if name == "SIGKILL" else "")
        if name == "SIGABRT":
            how += f" (as gloo does where ranks make different collectives: {_hang_command(folder)} compares them)"
    else:
        how = f"failed with exit code {failure.exitcode}; the messages above say why"
    say(f"rank {rank} (process {failure.pid}) {how}. All ranks of this node have ended.")
    return max(1, failure.exitcode)


def _hang_command(folder: Path) -> str:
    run_dir = run_dir_of(folder)
    return f"mimo-train hang {shlex.quote(str(run_dir)) if run_dir else 'RUN_DIR'}"


def end_with_launcher() -> None:
    """Asks Linux to send this process SIGTERM when its launcher dies, even by SIGKILL: a rank that outlives it would
    write into the folder of the run that replaces it. Does nothing on other systems, and without torchrun."""
    launched = "TORCHELASTIC_RUN_ID" in os.environ  # a shell that ends must not end what was started from it
    if sys.platform == "linux" and launched:
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM, 0, 0, 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        say(str(error))
        sys.exit(1)
