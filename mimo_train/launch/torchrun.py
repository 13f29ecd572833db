"""Start one node's ranks with torchrun's elastic agent, stop them gracefully, and restart them.

In addition to torchrun:

- SIGTERM, SIGINT, SIGHUP or SIGUSR1 reaches each rank once, as SIGTERM. The ranks have ``MIMO_GRACE_SECONDS`` to finish
  their step, save and exit 0; the launcher then exits 0 too. A second SIGINT, at least a second later, kills the ranks.
- The last line of output names the rank that failed first, instead of torchrun's two tracebacks.
- Failed ranks restart (``--max-restarts``) after a doubling delay, on all nodes or on none. The same failure twice at
  one step ends the run (``restarts``).

Without running ranks, signals end the launcher.
"""

import logging
import os
import secrets
import shlex
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from mimo_train.config.errors import UserError
from mimo_train.flight.watchdog import HANG_CODE, hand_down, say
from mimo_train.launch.exit_signal import ExitSignal, grace_seconds, is_repeat
from mimo_train.launch.nodes import Nodes
from mimo_train.launch.restarts import STOPPED_CODE, Restarts, first_wait, newest_failure, stopped_code
from mimo_train.logging.rank_log import errors_only

SIGNALS = ExitSignal.SIGNALS
JOIN_SECONDS = 900.0
"""Seconds that nodes wait for each other before the first start and before a restart."""
REASONS = {
    16: "a loss was wrong twice: start the run again on another machine, which repeats the step and compares",
    17: "a loss could not be trusted: the messages above say whether a machine is at fault",
    HANG_CODE: "the run hung, the report above says where: the same command continues from the newest checkpoint",
}
"""Exit codes with which ranks end a run on purpose (`train.rerun`, `run.hang_report_seconds`)."""


class NodeRendezvous(StaticTCPRendezvous):
    """Join the launchers of all nodes in a TCPStore at MASTER_ADDR:MASTER_PORT, which node 0 keeps open over restarts.

    Nodes are numbered by NODE_RANK. The ranks of each start get an empty store, so that a restart reads no old keys.

    Raises:
        UserError: MASTER_PORT is in use, or node 0 does not answer.
    """

    def __init__(self, nodes: Nodes) -> None:
        address, port = (nodes.address, nodes.port) if nodes.number > 1 else ("localhost", 0)
        super().__init__(address, port, nodes.node, nodes.number, "", int(JOIN_SECONDS))
        self._start = 0
        place = f"MASTER_ADDR {address}, MASTER_PORT {port}"
        if nodes.number > 1:
            say(f"node {nodes.node} of {nodes.number} joins at {place}")
        try:
            self._agents = self._open(port)
        except RuntimeError as error:
            if nodes.node == 0:
                raise UserError(
                    f"MASTER_PORT: cannot listen on port {port} of node 0 ({socket.gethostname()}): "
                    f"{_first_line(error)}. End the program that uses it, or set another MASTER_PORT on all nodes."
                ) from error
            raise UserError(
                f"{place}: node 0 did not answer within {JOIN_SECONDS:g} s ({_first_line(error)}). Check both "
                "variables and that node 0 has started."
            ) from error
        if self._agents.add(f"node {nodes.node}", 1) > 1:
            raise UserError(
                f"NODE_RANK: node {nodes.node} has joined already. Give each node its own number; if the run before is "
                "still ending, start again."
            )

    def _open(self, port: int) -> TCPStore:
        return TCPStore(self.master_addr, port, None, self.rank == 0, self.timeout, wait_for_workers=False)

    def start_again(self, wanted: bool) -> bool:
        """Agree with the other nodes on another start; True if all want it.

        Raises:
            UserError: another node has ended, or did not answer within JOIN_SECONDS.
        """
        self._start += 1
        wishes = [f"start {self._start} of node {node}" for node in range(self.world_size)]
        try:
            self._agents.set(wishes[self.rank], str(wanted))
            return all(wish == b"True" for wish in self._agents.multi_get(wishes))
        except RuntimeError as error:
            raise UserError(f"not all nodes agreed on a restart: {_first_line(error)}") from error

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all nodes; node 0 opens a store for the ranks of this start, whose run id all nodes share.

        Raises:
            UserError: not all nodes came within JOIN_SECONDS.
        """
        store = PrefixStore(f"{self._start}/", self._agents)
        try:
            if self.rank == 0:
                ranks = self._store = self._open(0)
                store.set("ranks", f"{secrets.token_hex(4)} {ranks.port}")
            self.run_id, port = store.get("ranks").decode().split()
        except RuntimeError as error:
            raise UserError(f"MASTER_ADDR {self.master_addr}: node 0 has ended: {_first_line(error)}") from error
        return RendezvousInfo(store, self.rank, self.world_size, RendezvousStoreInfo(self.master_addr, int(port)))


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


class Agent(LocalElasticAgent):
    """torchrun's agent for one start of this node's ranks, with a graceful stop.

    Args:
        spec: worker spec of the ranks.
        log_dir: folder for torchrun's files.
        grace_seconds: seconds that ranks may take to finish after a stop request.
    """

    def __init__(self, spec: WorkerSpec, log_dir: Path, grace_seconds: float) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=str(log_dir)))
        self.grace_seconds = grace_seconds
        self.stop_requested_at: float | None = None
        """Monotonic time of the first signal."""
        self.killed: dict[int, str] = {}
        """Process ids of ranks that this launcher has killed, and why."""
        self._forwarded = False

    def request_stop(self, signum: int, _frame: object) -> None:
        """Handle a stop signal: send SIGTERM to the ranks, once."""
        if self.stop_requested_at is None:
            self.stop_requested_at = time.monotonic()
            say(
                f"{signal.Signals(signum).name}: the ranks finish their step and save, for at most "
                f"{self.grace_seconds:g} s (MIMO_GRACE_SECONDS)"
            )
            signal.setitimer(signal.ITIMER_REAL, self.grace_seconds)
            self._forward()
        elif signum == signal.SIGINT and not is_repeat(self.stop_requested_at):
            say("SIGINT again: ending the ranks now")
            self._kill("SIGINT came twice")

    def end_of_grace(self, _signum: int, _frame: object) -> None:
        """Handle the timer: kill the remaining ranks."""
        say(f"the ranks did not finish within {self.grace_seconds:g} s (MIMO_GRACE_SECONDS): ending them")
        self._kill(f"it did not finish within {self.grace_seconds:g} s after a stop was asked for (MIMO_GRACE_SECONDS)")

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        signal.signal(signal.SIGALRM, self.end_of_grace)
        for signum in SIGNALS:
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # nohup
                signal.signal(signum, self.request_stop)
        started = super()._start_workers(worker_group)
        if self.stop_requested_at is not None:  # a signal arrived during the start
            self._forward()
        return started

    def _forward(self) -> None:
        """Send SIGTERM to each rank but not to its session: its data workers must live until it ends."""
        if self._pcontext is not None and not self._forwarded:
            self._forwarded = True
            for pid in self._running():
                os.kill(pid, signal.SIGTERM)

    def _kill(self, reason: str) -> None:
        for pid in self._running():
            self.killed[pid] = reason
            os.killpg(pid, signal.SIGKILL)  # torchrun gives each rank a session

    def _running(self) -> list[int]:
        handlers = self._pcontext.subprocess_handlers.values() if isinstance(self._pcontext, SubprocessContext) else ()
        return [handler.proc.pid for handler in handlers if handler.proc.poll() is None]


def launch(command: Sequence[str], nodes: Nodes, per_node: int, run_dir: Path) -> int:
    """Start this node's ranks and wait for them.

    Args:
        run_dir: `run.dir`, whose files hold the cause of a failure.

    Returns:
        0 if every rank exited 0, also after a requested stop; else the exit code of the rank that failed first, or 1 if
        a signal ended it.

    Raises:
        UserError: the nodes cannot join, or a time variable is not a number of seconds.
    """
    restarts, grace = Restarts(nodes.max_restarts, first_wait()), grace_seconds()
    hand_down()
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler waits for the store, which is C++
    errors_only(inherited=False)  # C++ warns about a store that is not up yet or has left first
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # torchrun's way to end ranks at once
    if "LOGLEVEL" not in os.environ:
        for name in [*logging.root.manager.loggerDict]:
            if name.startswith("torch.distributed"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
    rendezvous = NodeRendezvous(nodes)
    with tempfile.TemporaryDirectory(prefix="mimo-train-") as folder:
        while True:
            spec = WorkerSpec(
                role="default",
                local_world_size=per_node,
                rdzv_handler=rendezvous,
                entrypoint=command[0],
                args=tuple(command[1:]),
                max_restarts=0,
                monitor_interval=0.1,
            )
            agent, started_at = Agent(spec, Path(folder), grace), time.time()
            result = agent.run()
            signal.setitimer(signal.ITIMER_REAL, 0)
            if not result.is_failed():
                _ignore_signals()  # a late signal must not change the exit code
                return 0
            code = _report(result, agent, run_dir)
            if agent.stop_requested_at is not None or not nodes.max_restarts:
                _ignore_signals()
                return code
            for signum in SIGNALS:
                if callable(signal.getsignal(signum)):
                    signal.signal(signum, signal.SIG_DFL)
            first = min(result.failures.values(), key=lambda failure: failure.timestamp)
            seconds, reason = restarts.after(newest_failure(run_dir, first.exitcode, started_at))
            say(reason)
            if not rendezvous.start_again(seconds is not None):
                if seconds is not None:
                    say("another node does not start its ranks again, and says why: this node ends too")
                return code
            time.sleep(seconds or 0.0)


def _ignore_signals() -> None:
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def _report(result: RunResult, agent: Agent, run_dir: Path) -> int:
    """Print the rank that failed first and return its exit code. Other ranks failed or were ended because of it."""
    rank, failure = min(result.failures.items(), key=lambda item: item[1].timestamp)
    if failure.exitcode in REASONS:
        say(f"exit code {failure.exitcode}: {REASONS[failure.exitcode]}. All ranks of this node have ended.")
        return failure.exitcode
    if failure.exitcode == stopped_code():
        say(f"exit code {failure.exitcode} ({STOPPED_CODE}): the run was stopped before its last step, and has saved.")
        return failure.exitcode
    if failure.pid in agent.killed:
        how = f"was ended by this launcher: {agent.killed[failure.pid]}; what it had not saved is trained again"
    elif agent.stop_requested_at is not None and failure.exitcode == -signal.SIGTERM:
        how = "was stopped before training began: nothing was saved"
    elif failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        how = f"was killed by {name}" + (" (out of memory, or killed by hand)" if name == "SIGKILL" else "")
        if name == "SIGABRT":
            hang = f"mimo-train hang {shlex.quote(str(run_dir))}"
            how += f" (as gloo does where ranks make different collectives: {hang} compares them)"
    else:
        how = f"failed with exit code {failure.exitcode}; the messages above say why"
    say(f"rank {rank} (process {failure.pid}) {how}. All ranks of this node have ended.")
    return max(1, failure.exitcode)
