"""Keys of where a run lives and what it runs on. Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from mimo_train.config.fault import Fault
from mimo_train.config.installed import library_faults
from mimo_train.config.keys import Section, key, value_faults
from mimo_train.config.places import local_faults

LEAST_PATIENCE = 0.25
"""`run.timeout_minutes` with in-process restarts, whose barriers wait twice as long, is longer than this."""

YEAR = 365 * 24 * 60
"""In minutes. Libraries count a timeout in units that far larger ones overflow."""


@dataclass
class RunConfig(Section):
    """Where a run lives and what it runs on."""

    dir: str = key("runs/run", filled="the folder that the run writes into")
    """Folder that the run writes into. The same folder again resumes the run."""
    seed: int = key(1234, at_least=0, at_most=2**63 - 1)
    """Seed of initial weights, of the order of samples and of dropout."""
    device: str = key("auto", choices=("auto", "cuda", "cpu"))
    """`auto` (CUDA where each process of a machine gets a device), `cuda` or `cpu`. On CUDA each process takes a GPU of
    its own."""
    timeout_minutes: float = key(10.0, at_least=0.001, below=YEAR)
    """Minutes that a rank waits for its peers in a collective before it gives up, less than a year. With
    `inprocess_restarts` above 0.25."""
    step_timeout_minutes: float = key(0.0, at_least=0, below=YEAR, zero_means="as `timeout_minutes`")
    """As `timeout_minutes`, from the second step of a start on: the first one, and what comes before it, may wait for
    compilers, for communicators of NCCL and for cold storage. Saves and evaluations in the loop count as steps. On the
    CPU it holds for collectives, not for messages between two ranks. 0: as `timeout_minutes`."""
    hang_report_seconds: float = key(300.0, at_least=0, below=60 * YEAR, zero_means="never")
    """Seconds without progress, in set-up too, after which a run says which rank is to blame and ends with exit code
    18; 0: never. See docs/reliability.md#hangs."""
    inprocess_restarts: int = key(0, at_least=0, at_most=1_000_000)
    """How often a failed run starts again inside its processes, from its newest checkpoint; 0: never. Needs the extra
    `resiliency`. See docs/reliability.md#in-process-restart."""

    def faults(self, resume: str) -> Iterator[Fault]:
        """Values that cannot be, alone and together with `checkpoint.resume`."""
        yield from value_faults(self, "run")
        yield from local_faults("run.dir", self.dir, "give the URL as checkpoint.dir")
        yield from library_faults(
            self, "run", {"inprocess_restarts": ("nvidia_resiliency_ext.inprocess", "'mimo-train[resiliency]'")}
        )
        if self.inprocess_restarts > 0 and 0 < self.timeout_minutes <= LEAST_PATIENCE:
            yield Fault(
                "run.timeout_minutes",
                f"must be above {LEAST_PATIENCE} with run.inprocess_restarts {self.inprocess_restarts}, is "
                f"{self.timeout_minutes}: ranks send a sign of life every second, and are missed after 30",
            )
        if self.inprocess_restarts > 0 and resume != "auto":
            yield Fault(
                "checkpoint.resume",
                f"must be auto with run.inprocess_restarts {self.inprocess_restarts}, is {resume!r}: a run that starts "
                "again continues from its newest checkpoint",
            )
