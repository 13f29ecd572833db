"""Runs that are made to hang, and what is said of them."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mimo_train.config.compose import load
from mimo_train.config.errors import UserError
from mimo_train.flight.read import Rank, newest_start, read_ranks
from mimo_train.layout.run import resolve
from tests.dist.ranks import started_ranks
from tests.dist.runs import TINY, TINY_ENCODER, train_rank
from tests.hang import HANG_SECONDS

REPORT_AFTER = 3
"""`run.hang_report_seconds` of these runs."""
HUNG = "hung"
"""A file in run.dir: the time at which the hang began."""
ENDLESS = (
    *TINY,
    *TINY_ENCODER,
    "train.iters=1000000",
    f"run.hang_report_seconds={REPORT_AFTER}",
    "train.log_interval=5",
)


def endless(run_dir: Path, shards: str, *overrides: str):
    """A tiny run of several modules that goes on for ever."""
    return load("vlm_digits", (*ENDLESS, f"run.dir={run_dir}", "data.demo=", f"data.shards={shards}", *overrides))


def hangs_now(cfg) -> None:
    """Note when a rank began to hang, for `HangingRun.seconds`."""
    with suppress(FileExistsError), open(Path(cfg.run.dir) / HUNG, "x") as file:
        file.write(repr(time.time()))


class HangingRun:
    """A run on as many processes as its layout needs, which are ended with the `with` statement.

    Args:
        cfg: its config.
        function: what each rank calls with it.
    """

    def __init__(self, cfg, function: Callable = train_rank):
        self.cfg, self.run_dir = cfg, Path(cfg.run.dir)
        self._ranks = started_ranks(function, resolve(cfg).layout.processes[-1] + 1, cfg)

    def __enter__(self) -> "HangingRun":
        self.processes = self._ranks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._ranks.__exit__(*error)

    def read(self) -> dict[int, Rank]:
        """The ranks' files; empty before there are any."""
        try:
            return read_ranks(newest_start(self.run_dir))
        except UserError:
            return {}

    def until_step(self, step: int) -> None:
        """Wait until every rank has begun a step."""
        count = len(self.processes)
        self.until(lambda ranks: len(ranks) == count and all(rank.step >= step for rank in ranks.values()))

    def until(self, happens: Callable[[dict[int, Rank]], object]) -> None:
        """Wait for something in the ranks' files."""
        deadline = time.monotonic() + HANG_SECONDS
        while not happens(self.read()):
            assert time.monotonic() < deadline, "did not happen"
            time.sleep(0.05)

    def stop(self, rank: int) -> None:
        """Stop a rank, as a debugger or a machine that freezes does."""
        hangs_now(self.cfg)
        os.kill(self.processes[rank].pid, signal.SIGSTOP)

    def report(self) -> str:
        """Wait for the watchdog's report."""
        deadline = time.monotonic() + HANG_SECONDS
        while time.monotonic() < deadline:
            for path in self.run_dir.glob("flight/*/report.txt"):
                text = path.read_text()
                if text.endswith("\n"):
                    return text
            time.sleep(0.05)
        raise AssertionError("there was no report")

    def seconds(self) -> float:
        """From the hang to the report, or to now where the run ends without one."""
        reports = [path.stat().st_mtime for path in self.run_dir.glob("flight/*/report.txt")]
        return min(reports, default=time.time()) - float((self.run_dir / HUNG).read_text())
